# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The replacement layer: experts born partitioned, routers marked to stay gathered."""
from deepspeed.moe.ep_repack import _get_expert_weight
from deepspeed.moe.expert_layout import grouped_layout, module_list_layout, separate_layout
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.zero.expert_partitioning import (are_born_partitioned, construct_partitioned,
                                                        experts_born_partitioned)
from deepspeed_autoep.extension import extends

_PARTITIONED = "partitioned-experts"


def _expert_sources(experts, spec):
    """The parameters of a block's experts by the names that its layout gives them."""
    names = [name for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) if name is not None]
    if spec.expert_storage == "module_list":
        return {
            f"{index}.{name}": _get_expert_weight(expert, name)
            for index, expert in enumerate(experts)
            for name in names
        }
    return {name: getattr(experts, name) for name in names}


def _layout_of(spec, sources):
    """The layout from a block's experts to the grouped experts' ``w1``, ``w2``, ``w3``."""
    shapes = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in sources.items()}
    w1, w2, w3 = spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name
    if spec.expert_storage == "module_list":
        return module_list_layout(shapes, spec.num_experts, gate=w1, down=w2, up=w3)
    if w3 is not None:
        return separate_layout(shapes, w1, w2, w3)
    fused = classify_fused_gate_up_layout(shapes[w1], shapes[w2])
    return grouped_layout(shapes, gate_up=w1, down=w2, is_transposed=fused is not None and fused.needs_transpose)


@extends("AutoEPMoELayer.__init__",
         feature=_PARTITIONED,
         why="a layer's new experts are partitioned over their expert-data-parallel group as they are constructed")
def construct_with_partitioned_experts(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    sources = _expert_sources(getattr(source_module, spec.experts_name), spec)
    with experts_born_partitioned(lambda: _layout_of(spec, sources), sources, ep_size, ep_rank):
        construct_with_partitioned_experts.original(self, spec, source_module, ep_size, ep_rank, config, *args,
                                                    **kwargs)


@extends("repack_expert_weights", feature=_PARTITIONED, why="no rank gathers a layer to copy its experts out of it")
def repack_expert_weights(experts_source, spec, ep_rank, ep_size):
    if are_born_partitioned():
        return None, None, None
    return repack_expert_weights.original(experts_source, spec, ep_rank, ep_size)


# The name is a function from here on; only the layer's constructor below it uses it.
@extends("GroupedExperts", feature=_PARTITIONED, why="constructed as shards, filled from the shards of the source")
def grouped_experts(dim, hidden_dim, num_experts, *args, **kwargs):
    return construct_partitioned(grouped_experts.original, dim, hidden_dim, num_experts, *args, **kwargs)


@extends("_copy_parameter_data", feature=_PARTITIONED, why="experts that were born partitioned are filled already")
def _copy_parameter_data(target, source):
    if source is not None:
        _copy_parameter_data.original(target, source)


@extends("AutoEPMoELayer.__init__",
         feature="force-persist",
         why="a released router costs a hidden all-gather per layer in backward, or fails (up to 0.19.3)")
def construct_with_persistent_router(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    construct_with_persistent_router.original(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs)
    for param in self.router.parameters():  # weight, bias, and a trainable score-correction bias
        param.ds_force_persist = True
