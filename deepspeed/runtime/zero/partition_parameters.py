# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What happens while a parameter is partitioned: persistence is decided, experts are allocated as shards."""
from deepspeed.runtime.zero.persistence import force_persist
from deepspeed.runtime.zero.unfilled import (allocates_shards, is_unfilled, partition_unfilled, start_leaving_unfilled,
                                             stop_leaving_unfilled)
from deepspeed_autoep.extension import extends

_UNFILLED = "unfilled-experts"


@extends("Init._convert_to_deepspeed_param",
         feature="force-persist",
         why="a parameter marked ds_force_persist before it is partitioned is persistent from then on")
def _convert_to_deepspeed_param(self, param):
    _convert_to_deepspeed_param.original(self, param)
    if force_persist(param) and not param.ds_persist:
        param.ds_persist = True
        type(self).num_persisted_parameters += 1
        type(self).num_persisted_elements += param.ds_numel


@extends("InsertPostInitMethodToModuleSubClasses._set_dtype",
         feature=_UNFILLED,
         why="a job without expert parallelism initializes its experts as DeepSpeed does")
def _set_dtype(self, ds_config, dtype):
    _set_dtype.original(self, ds_config, dtype)
    self.spreads_experts = ds_config is not None and ds_config.expert_parallel_config.enabled


@extends("InsertPostInitMethodToModuleSubClasses._add_tensor_creation_wrappers",
         feature=_UNFILLED,
         why="an experts module's tensors used to exist whole on every rank until its constructor was done")
def _add_tensor_creation_wrappers(self):
    _add_tensor_creation_wrappers.original(self)
    if self.spreads_experts and allocates_shards(self):
        start_leaving_unfilled()


@extends("Init._zero_init_param",
         feature=_UNFILLED,
         why="a parameter without contents is partitioned by allocating its shard: nothing to broadcast or to copy")
def _zero_init_param(self, param):
    if is_unfilled(param):
        partition_unfilled(self, param)
    else:
        _zero_init_param.original(self, param)


@extends("InsertPostInitMethodToModuleSubClasses.unpatch_init_and_builtins",
         feature=_UNFILLED,
         why="after zero.Init a parameter of experts is an ordinary one")
def unpatch_init_and_builtins(self):
    unpatch_init_and_builtins.original(self)
    stop_leaving_unfilled()
