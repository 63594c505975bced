# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where AutoEP enters the engine."""
import contextlib
import copy
import gc

import torch

from deepspeed.checkpoint.constants import (AUTOEP_LAYERS_KEY, AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY,
                                            AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT)
from deepspeed.module_inject.experts_only import (EXPERTS_ONLY_KEYS, ExpertParallelExperts, ExpertsSpec, check_experts,
                                                  local_state)
from deepspeed.moe.reshard_exchange import bucket_bytes_of
from deepspeed.runtime.zero.expert_partitioning import replacing_layers_of
from deepspeed_autoep.extension import adds, extends


def _check_model(engine, model):
    """Raise for a model that the ``expert_parallel`` block cannot be applied to, before any process group is made."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import validate_autoep_post_detection
    from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type

    chosen = engine._config.expert_parallel_config.preset_model
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    fitting = preset_name_for_hf_model_type(model_type)
    if chosen is not None and fitting is not None and chosen != fitting:
        # Blocks of different families look alike; the wrong preset would drop shared experts or route differently.
        raise ValueError(f"expert_parallel.preset_model: found {chosen!r} for a model of type {model_type!r}; "
                         f"allowed: {fitting!r}, or no preset_model at all")
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if on_meta is not None:
        raise ValueError(
            f"expert_parallel: found parameter '{on_meta}' on the meta device, without contents; allowed: "
            "parameters on a device, or partitioned. Build or load the model inside "
            "deepspeed.zero.Init, or without a meta device.")
    config = copy.copy(engine._config.expert_parallel_config)  # detection fills in what the model's config says
    specs = AutoEP(model, config).ep_parser()
    if isinstance(specs[0], ExpertsSpec):
        _refuse_keys_of_blocks(engine._config._param_dict["expert_parallel"])
        check_experts(model, specs, config.autoep_size)
    validate_autoep_post_detection(config, specs)


def _refuse_keys_of_blocks(block):
    unused = sorted(set(block) - EXPERTS_ONLY_KEYS)
    if unused:
        raise ValueError(
            f"expert_parallel: found {', '.join(unused)}, of DeepSpeed's replacement of whole MoE blocks, "
            "while only the experts of this model are replaced; allowed: leaving them out, or "
            "preset_model to replace whole blocks")


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="config-errors",
         why="a model that the block does not fit is refused on every rank before the first collective")
def refuse_unfit_model(self, model, *args, **kwargs):
    if self._config.expert_parallel_config.enabled:
        _check_model(self, model)
    return refuse_unfit_model.original(self, model, *args, **kwargs)


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="partitioned-experts",
         why="the engine's configuration decides how a layer's new experts are partitioned")
def replace_with_partitioned_experts(self, model, *args, **kwargs):
    block = self._config.expert_parallel_config
    if not (block.enabled and self.zero_optimization_partition_weights()):
        return replace_with_partitioned_experts.original(self, model, *args, **kwargs)
    config = self._config._param_dict
    with replacing_layers_of(model, config, bucket_bytes_of(config)):
        replaced = replace_with_partitioned_experts.original(self, model, *args, **kwargs)
    gc.collect()  # a ZeRO parameter's own methods close over it: only the collector frees what was replaced
    return replaced


def _remaps_optimizers(engine_module):
    return hasattr(engine_module, "_remap_client_optimizer_after_module_replacement")


def _experts_and_rest(module):
    """Parameters of a MoE block or layer: those of its experts, and all others."""
    experts = list(module.experts.parameters())
    return experts, [param for param in module.parameters() if all(param is not other for other in experts)]


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="stale-optimizers",
         why="what each layer's parameters replace is remembered for an optimizer that was made before",
         unless=_remaps_optimizers)
def remember_sources(self, model, *args, **kwargs):
    self._expert_parallel_sources = {
        name: [{id(param)
                for param in part} for part in _experts_and_rest(block)]
        for name, block in model.named_modules()
        if self._config.expert_parallel_config.enabled and isinstance(getattr(block, "experts", None), torch.nn.Module)
    }
    return remember_sources.original(self, model, *args, **kwargs)


@extends("DeepSpeedEngine._check_for_duplicates",
         feature="stale-optimizers",
         why="up to 0.19.6 an optimizer made before the replacement trains the discarded experts, silently",
         unless=_remaps_optimizers)
def move_stale_optimizer(self, optimizer):
    live = {id(param) for param in self.module.parameters()}
    for group in optimizer.param_groups if self._config.expert_parallel_config.enabled else ():
        stale = {id(param) for param in group["params"]} - live
        group["params"] = [param for param in group["params"] if id(param) in live]
        owned = {id(param) for other in optimizer.param_groups for param in other["params"]}
        for name, parts in self._expert_parallel_sources.items():
            for ids, params in zip(parts, _experts_and_rest(self.module.get_submodule(name))):
                if ids & stale:  # its place is in the group of what it replaces
                    group["params"] += [param for param in params if id(param) not in owned]
    return move_stale_optimizer.original(self, optimizer)


@contextlib.contextmanager
def _experts_like_any_parameter(engine, operation):
    """Let ZeRO-3 save or load experts by their shards, as any parameter; DeepSpeed's way knows whole blocks only."""
    if not any(isinstance(module, ExpertParallelExperts) for module in engine.module.modules()):
        yield False
        return
    if not engine.zero_optimization_partition_weights():
        raise NotImplementedError(
            f"{operation}: found zero_optimization.stage={engine.zero_optimization_stage()} with "
            "expert parallelism of the experts only; allowed: stage 3, or "
            "expert_parallel.preset_model to replace whole blocks")
    moe_layers, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        with local_state():
            yield True
    finally:
        engine.has_moe_layers = moe_layers


@extends("DeepSpeedEngine.save_checkpoint", feature="experts-only", why="experts are saved by their ZeRO-3 shards")
def save_checkpoint(self, *args, **kwargs):
    with _experts_like_any_parameter(self, "save_checkpoint"):
        return save_checkpoint.original(self, *args, **kwargs)


@extends("DeepSpeedEngine.load_checkpoint", feature="experts-only", why="experts are loaded by their ZeRO-3 shards")
def load_checkpoint(self,
                    load_dir,
                    tag=None,
                    load_module_strict=True,
                    load_optimizer_states=True,
                    load_lr_scheduler_states=True,
                    load_module_only=False,
                    *args,
                    **kwargs):
    with _experts_like_any_parameter(self, "load_checkpoint") as sharded:
        if sharded and (load_module_only or not load_optimizer_states):
            raise NotImplementedError(
                f"load_checkpoint: found load_module_only={load_module_only}, "
                f"load_optimizer_states={load_optimizer_states} with experts in ZeRO-3's shards, "
                "which hold weights and optimizer state together; allowed: False and True")
        return load_checkpoint.original(self, load_dir, tag, load_module_strict, load_optimizer_states,
                                        load_lr_scheduler_states, load_module_only, *args, **kwargs)


@extends("DeepSpeedEngine._common_checkpoint_state",
         feature="experts-only",
         why="zero_to_fp32 would join the shards of different experts; the mark makes it say so")
def mark_partitioned_experts(self, *args, **kwargs):
    state = mark_partitioned_experts.original(self, *args, **kwargs)
    names = [name for name, module in self.module.named_modules() if isinstance(module, ExpertParallelExperts)]
    if names:
        mark = {AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY: AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT}
        state[AUTOEP_LAYERS_KEY] = [dict(mark, module_path=name) for name in names]
    return state


_HF = "hf-checkpoint"


@adds("DeepSpeedEngine.save_hf_checkpoint",
      feature=_HF,
      why="a trained model comes out as a plain Hugging Face folder")
def save_hf_checkpoint(self, save_dir, max_shard_size="50GB", tokenizer=None):
    """See ``deepspeed.checkpoint.hf_export.save_hf_checkpoint``."""
    from deepspeed.checkpoint import hf_export  # imports Transformers, which a job with experts has loaded already

    hf_export.save_hf_checkpoint(self, save_dir, max_shard_size, tokenizer)


@extends("DeepSpeedEngine._raise_if_autoep_zero3_consolidated_export",
         feature=_HF,
         why="consolidating experts that are spread over ranks is not an error any more")
def allow_consolidated_export(self, operation):
    """Nothing to raise."""


@extends("DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
         feature=_HF,
         why="Trainer, Accelerate and save_16bit_model get the whole model, under the names of the unmodified one")
def consolidated_state_dict(self, exclude_frozen_parameters=False):
    if not self._has_autoep_layers():
        return consolidated_state_dict.original(self, exclude_frozen_parameters)
    from deepspeed.checkpoint import hf_export

    return hf_export.consolidated_state_dict(self, exclude_frozen_parameters)
