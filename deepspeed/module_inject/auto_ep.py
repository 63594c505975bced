# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Finding the MoE layers of a model."""
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.experts_only import ExpertsSpec, find_experts, replace_experts
from deepspeed.moe.experts_interface import refuse_unsupported_family
from deepspeed_autoep.extension import extends

# Each of these keys selects the whole-block way; without them the experts alone are replaced.
WHOLE_BLOCK_NAMES = ("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2")


@extends("AutoEP.ep_parser",
         feature="experts-only",
         why="every family on Transformers' experts interface, without a preset")
def find_experts_only(self):
    if any(getattr(self.config, key) is not None for key in WHOLE_BLOCK_NAMES):
        return find_experts_only.original(self)
    specs = find_experts(self.model)
    if not specs:
        refuse_unsupported_family(self.model)
    return specs or find_experts_only.original(self)


@extends("AutoEP.ep_parser",
         feature="config-errors",
         why="a model without MoE layers, or one replaced before, is an error and not a silent run without experts")
def ep_parser(self):
    replaced = [name for name, module in self.model.named_modules() if getattr(module, "_is_autoep_layer", False)]
    if replaced:
        raise ValueError(f"expert_parallel: found {type(self.model).__name__} with '{replaced[0]}' (and "
                         f"{len(replaced) - 1} more) already replaced by an earlier deepspeed.initialize; allowed: a "
                         "model that was not passed to it yet. Build or load the model again.")
    specs = ep_parser.original(self)
    if not specs:
        raise ValueError(f"expert_parallel.enabled: found no MoE layer in {type(self.model).__name__} (model_type="
                         f"{getattr(self.model_config, 'model_type', None)!r}); allowed: a model built on the experts "
                         "interface of Transformers, or moe_layer_pattern with custom names. For a plain ZeRO run set "
                         "enabled to false.")
    return specs


@extends("AutoEP.replace_moe_layers",
         feature="experts-only",
         why="only the experts of a family are replaced; its block, router and shared experts stay")
def replace_moe_layers(self, specs, ep_size, ep_rank, *args, **kwargs):
    if not isinstance(specs[0], ExpertsSpec):
        return replace_moe_layers.original(self, specs, ep_size, ep_rank, *args, **kwargs)
    replaced = replace_experts(self.model, specs, ep_size, ep_rank)
    if not hasattr(auto_ep_layer, "ReplacementSourceMap"):  # up to 0.19.6, see stale-optimizers
        return None
    sources = auto_ep_layer.ReplacementSourceMap()
    if kwargs.get("collect_sources"):
        sources.sources = {id(param): [source] for param, source in replaced}
        sources.discarded = {id(source) for _, source in replaced}
    return sources
