# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where AutoEP enters the engine."""
import copy
import gc

import torch

from deepspeed.moe.reshard_exchange import DEFAULT_BUCKET_BYTES
from deepspeed.runtime.zero.expert_partitioning import replacing_layers_of
from deepspeed_autoep.extension import extends


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
    validate_autoep_post_detection(config, AutoEP(model, config).ep_parser())


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
    bucket_bytes = config["expert_parallel"].get("reshard_bucket_bytes", DEFAULT_BUCKET_BYTES)
    with replacing_layers_of(model, config, bucket_bytes):
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
