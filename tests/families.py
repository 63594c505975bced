# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every MoE family in the installed Transformers, with inputs and a loss for each.

A family is a folder of ``transformers.models`` whose model file puts a class on the experts interface. Most need
nothing but small sizes; ``_OWN`` has what a family needs besides.
"""
import copy
import dataclasses
import importlib
import pathlib

import torch
import torch.nn.functional as F
import transformers

VOCABULARY = 64
HIDDEN = 32
EXPERTS = 8
BATCH, LENGTH = 2, 16

# Names beyond the families: other models of a family, with experts that its first model lacks or uses differently.
VARIANTS = [
    "diffusion_gemma:full",  # encoder and decoder hold the same experts' parameters
    "dots3_note:vision",  # the number of experts differs by layer; rows are image patches
    "ernie4_5_vl_moe:both",  # a layer has text and vision experts, and this one's inputs use both
    "qwen3_omni_moe:talker",  # a second experts class
    "step3p7",  # its experts follow the interface's contract without the decorator
]

# A setting of many names. A config has some of them, and a caller of build() says the first one.
_SPELLINGS = {
    "num_experts": {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"},
    "num_experts_per_tok": {"num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"},
}  # yapf: disable

# For every family, as far as its config has the field. Sizes of experts are multiples of 4: torch._grouped_mm takes
# rows of a multiple of 16 bytes only. As many key heads as query heads, because latent attention wants that.
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, intermediate_size=48, pad_token_id=0,
    # experts
    num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1,
    mlp_layer_types=["dense", "sparse"], first_k_dense_replace=1, num_dense_layers=1, mlp_only_layers=[],
    shared_expert_intermediate_size=16, moe_shared_expert_intermediate_size=16, shared_experts_intermediate_size=16,
    shared_intermediate_size=16, dense_intermediate_size=48, share_expert_dim=16,
    # latent, indexed and sliding-window attention
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    index_head_dim=16, index_n_heads=2, index_topk=8, sliding_window=8, sliding_window_size=8,
    swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_head_dim=16,
    # linear attention and state spaces
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_num_heads=2, linear_head_dim=16, mamba_d_state=8, mamba_n_heads=4, mamba_dt_rank=4,
)  # yapf: disable

_HYBRID = dict(layer_types=["linear_attention", "full_attention"])
_GEMMA = dict(num_global_key_value_heads=2, global_head_dim=16)  # of its layers without a window
_INKLING2 = dict(unpadded_vocab_size=60, n_layers_per_attn_res_block=1)


def _mrope(*section, **more):
    """Rotary embeddings of three axes (time, height, width), whose sections fill half of a head's rotated part."""
    return dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=list(section), **more))


_OWN = {
    "bailing_hybrid": _HYBRID,
    "deepseek_v4": dict(num_hidden_layers=3, mlp_layer_types=["hash_moe", "moe", "moe"], o_groups=2,
                        o_lora_rank=16),
    "diffusion_gemma": _GEMMA,
    "diffusion_gemma:full": dict(canvas_length=8,
                                 vision_config=dict(model_type="gemma4_vision", hidden_size=HIDDEN,
                                                    intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                                    num_key_value_heads=2, head_dim=16, global_head_dim=16,
                                                    patch_size=4, position_embedding_size=16)),
    "dots1": dict(n_shared_experts=1),
    "dots3_note:vision": dict(num_hidden_layers=3, pyramid_num_routed=[-1, 4, 8], adapter_in_dim=HIDDEN,
                              adapter_out_dim=HIDDEN),
    "ernie4_5_vl_moe": dict(moe_intermediate_size=[16, 12], **_mrope(2, 2, 4)),
    "gemma4": dict(enable_moe_block=True, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4,
                   **_GEMMA),
    "glm4v_moe": _mrope(4, 2, 2, partial_rotary_factor=1.0),
    "glm5_next": dict(index_kpool=4, qk_rope_head_dim=0, layer_types=["linear_attention", "indexed_attention"]),
    "granitemoehybrid": _HYBRID,
    "hy_v4_vl": _mrope(2, 1, 1),
    "inkling2": _INKLING2,
    "inkling2_loop": dict(num_hidden_layers=4, loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
                          loop_gate_rank=8, **_INKLING2),
    "jamba": dict(attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0),
    "kimi_linear": _HYBRID,
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mimo_v2_flash": dict(num_key_value_heads=1),  # twice as many in layers with a sliding window
    "muse_spark": dict(moe_hidden_size=24),
    "nemotron_h": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                       mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=2, moe_latent_size=24),
    "phimoe": dict(router_jitter_noise=0.5),  # at 0 the weights of the chosen experts are 1, whatever the router says
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen3_omni_moe:talker": dict(shared_expert_intermediate_size=16),
    "qwen4_exp": dict(layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=2, indexer_kv_heads=1,
                      indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2, hc_lowrank=8),
    "step3p7": dict(swiglu_limits=[None, 1.0]),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}  # yapf: disable

# The others' is the first causal language model of the family, or else its first text model.
_CLASSES = {
    "diffusion_gemma:full": "DiffusionGemmaModel",
    "dots3_note:vision": "Dots3NoteVisionModel",
    "openai_privacy_filter": "OpenAIPrivacyFilterModel",
    "qwen3_omni_moe:talker": "Qwen3OmniMoeTalkerModel",
}


def names() -> list:
    """The families that the installed Transformers has, then those of ``VARIANTS``; reads files, imports nothing."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py") if "@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    return sorted(found) + [name for name in VARIANTS if (models / _folder(name)).is_dir()]


def build(family: str, seed: int = 0, experts_implementation: str = "eager", **overrides):
    """Return a float32 model on the CPU, in eval mode (no dropout, no noise in the routing), that takes gradients.

    One seed makes the same weights in every process, and the caller's random numbers go on as if nothing was drawn.

    Args:
        family: one of ``names()``.
        overrides: fields of the family's config. ``num_experts`` and ``num_experts_per_tok`` mean the field that the
            config has for them (not in dots3_note:vision, which has 4 and 8 experts by ``pyramid_num_routed``).
    """
    model_class = _model_class(family)
    config = _config(family, overrides)
    config._attn_implementation = "eager"
    config._experts_implementation = experts_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=torch.float32)
        _randomize(model)
    return model.eval()


def inputs(family: str, model, seed: int) -> dict:
    """Keyword arguments for ``model``, different for every seed.

    Mostly ``input_ids`` ``[2, 16]`` int64. Instead, the talker, which cannot embed ids, takes float32
    ``inputs_embeds`` ``[2, 16, H]`` and the vision tower float32 ``pixel_values`` ``[48, C * P * P]`` of two images.
    In addition, ``decoder_input_ids`` ``[2, 8]`` for diffusion_gemma:full; int32 ``moe_mm_token_type_ids``
    ``[2, 16]`` and int64 ``position_ids`` ``[3, 2, 16]`` for ernie4_5_vl_moe:both. Plain ernie4_5_vl_moe gets text
    only, so that its vision experts are never called and get no gradient.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(length):  # no padding, first or last token
        return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)

    if family == "dots3_note:vision":
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])  # frames, rows and columns of patches
        patch = model.config.num_channels * model.config.patch_size**2
        return dict(pixel_values=torch.randn(int(grid.prod(1).sum()), patch, generator=generator), grid_thw=grid)
    if family == "qwen3_omni_moe:talker":
        found = dict(inputs_embeds=torch.randn(BATCH, LENGTH, model.config.hidden_size, generator=generator))
    else:
        found = dict(input_ids=ids(LENGTH))
    if family == "ernie4_5_vl_moe:both":
        found["moe_mm_token_type_ids"] = (torch.rand(BATCH, LENGTH, generator=generator) < 0.4).int()  # 1: vision
        found["position_ids"] = torch.arange(LENGTH).expand(3, BATCH, LENGTH)
    if family == "diffusion_gemma:full":
        found["decoder_input_ids"] = ids(model.config.canvas_length)
    if not family.startswith("diffusion_gemma"):  # whose decoder reads the cache that its encoder filled
        found["use_cache"] = False
    return found


def scalar_loss(output, seed: int = 0) -> torch.Tensor:
    """Float32 scalar: the mean squared distance of every floating-point tensor of a model's output to random numbers.

    A sum of squares cannot cancel, so two runs can be compared by relative error. What a model records on demand
    (router logits, hidden states) comes in tuples or under a router's name, and is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    distances = []
    for name, tensor in output.items():
        if torch.is_tensor(tensor) and tensor.is_floating_point() and "router" not in name:
            target = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            distances.append(F.mse_loss(tensor.float(), target))
    return torch.stack(distances).sum()


def _folder(family):
    return family.partition(":")[0]


def _model_class(family):
    module = importlib.import_module(f"transformers.models.{_folder(family)}.modeling_{_folder(family)}")
    if family in _CLASSES:
        return getattr(module, _CLASSES[family])
    defined = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    endings = ("ForCausalLM", "TextModel")
    return next(found for end in endings for found in defined if found.__name__.endswith(end))


def _config(family, overrides):
    config_class = _model_class(family).config_class
    fields = {field.name for field in dataclasses.fields(config_class)}
    if family == "diffusion_gemma:full":
        overrides = dict(text_config=_config(_folder(family), overrides))
    settings = {key: value for key, value in _SIZES.items() if key in fields or key in _SPELLINGS}
    settings.update(_OWN.get(family, _OWN.get(_folder(family), {})))
    spelled = {}
    for key, value in {**settings, **overrides}.items():
        spelled.update(dict.fromkeys(fields & _SPELLINGS[key] if key in _SPELLINGS else [key], value))
    return config_class(**copy.deepcopy(spelled))  # a config changes the dicts that it is given


@torch.no_grad()
def _randomize(model):
    """Draw weights large enough for tokens to route unevenly, and what else is constant or uninitialized until loaded.

    Norms, scales and other vectors keep what the family's initialization gave them.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, kind = name.rpartition(".")
        owner = model.get_submodule(owner)
        if kind == "tid2eid":  # int64 [vocabulary, k], the experts of each token: k different ones
            tensor.copy_(torch.rand(len(tensor), owner.num_experts).argsort(1)[:, :tensor.shape[1]])
        elif kind.endswith(("bias", "biases")):  # those that are not trained correct the scores of experts
            noise = torch.randn_like(tensor).mul_(0.05 if tensor.requires_grad else 0.01)
            tensor.copy_(torch.where(tensor == 0, noise, tensor))  # zaya's -1 against skipping the experts stays
        elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() in (2, 3):
            of_embedding = isinstance(owner, torch.nn.Embedding)  # large, or attention makes all tokens alike
            tensor.normal_(std=1.0 if of_embedding else 0.2 if tensor.dim() == 2 else 0.3)
