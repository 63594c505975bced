# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Models under ZeRO-3 and the engines that train them, as a user's script would set them up."""
import contextlib

# Weight decay and an epsilon well above rounding noise: AdamW would otherwise turn the sign of a gradient that is
# zero but for rounding into a full step, in the reference and in the engine differently.
ADAMW = dict(lr=5e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)


def ds_config(autoep_size=None, zero=None, dtype=None, block=None, preset=None, **top_level):
    """A DeepSpeed configuration for tests; ``autoep_size=None`` leaves out the ``expert_parallel`` block.

    Args:
        autoep_size: expert-parallel degree.
        zero: keys added to ``zero_optimization`` (stage 3).
        dtype: ``"bf16"`` or ``"fp16"``; float32 when None.
        block: keys added to ``expert_parallel``.
        preset: replace whole blocks by this preset; the experts only when None.
        top_level: further top-level keys.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 when the config says nothing
        "zero_optimization": {"stage": 3, **(zero or {})},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    }  # yapf: disable
    if autoep_size is not None:
        config["expert_parallel"] = {"enabled": True, "autoep_size": autoep_size, **(block or {})}
        if preset is not None:
            config["expert_parallel"]["preset_model"] = preset
    if dtype is not None:
        config[dtype] = {"enabled": True}
    return {**config, **top_level}


@contextlib.contextmanager
def engine_of(checkpoint, config, initialize=None, **from_pretrained):
    """Yield an engine for the Hugging Face checkpoint folder, loaded under ``zero.Init``; destroy it afterwards.

    ``initialize`` holds further arguments of ``deepspeed.initialize``; a callable is called with the loaded model.
    """
    import gc

    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    hf_config = HfDeepSpeedConfig(config)  # from_pretrained builds under zero.Init as long as this lives
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", **from_pretrained)
    arguments = initialize(model) if callable(initialize) else (initialize or {})
    arguments = dict(model_parameters=model.parameters(), **arguments)
    engine = deepspeed.initialize(model=model, config=config, **arguments)[0]
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model, hf_config
        gc.collect()


def autoep_layers(model):
    """Map the name of every expert-parallel layer to the layer."""
    return {name: module for name, module in model.named_modules() if getattr(module, "_is_autoep_layer", False)}
