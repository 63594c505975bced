# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The replacement layer: experts born partitioned, routers marked to stay gathered."""
from deepspeed.runtime.zero.expert_partitioning import (construct_partitioned, experts_born_partitioned, write_shard)
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed_autoep.extension import extends

_PARTITIONED = "partitioned-experts"


@extends("AutoEPMoELayer.__init__",
         feature=_PARTITIONED,
         why="a layer's new experts are partitioned over their expert-data-parallel group as they are constructed")
def construct_with_partitioned_experts(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    source_params = getattr(source_module, spec.experts_name).parameters()
    with experts_born_partitioned(source_params, ep_size):
        construct_with_partitioned_experts.original(self, spec, source_module, ep_size, ep_rank, config, *args,
                                                    **kwargs)


@extends("GroupedExperts", feature=_PARTITIONED, why="constructed inside a zero.Init bound to the EDP group")
def grouped_experts(dim, hidden_dim, num_experts, *args, **kwargs):
    return construct_partitioned(grouped_experts.original, dim, hidden_dim, num_experts, *args, **kwargs)


@extends("_copy_parameter_data", feature=_PARTITIONED, why="a partitioned expert parameter takes its shard only")
def _copy_parameter_data(target, source):
    if is_zero_param(target):
        write_shard(target, source)
    else:
        _copy_parameter_data.original(target, source)


@extends("AutoEPMoELayer.__init__",
         feature="force-persist",
         why="a released router costs a hidden all-gather per layer in backward, or fails (up to 0.19.3)")
def construct_with_persistent_router(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    construct_with_persistent_router.original(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs)
    for param in self.router.parameters():  # weight, bias, and a trainable score-correction bias
        param.ds_force_persist = True
