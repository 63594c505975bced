# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``ds_force_persist`` where persistence is decided while a parameter is partitioned."""
from deepspeed.runtime.zero.persistence import force_persist
from deepspeed_autoep.extension import extends


@extends("Init._convert_to_deepspeed_param",
         feature="force-persist",
         why="a parameter marked ds_force_persist before it is partitioned is persistent from then on")
def _convert_to_deepspeed_param(self, param):
    _convert_to_deepspeed_param.original(self, param)
    if force_persist(param) and not param.ds_persist:
        param.ds_persist = True
        type(self).num_persisted_parameters += 1
        type(self).num_persisted_elements += param.ds_numel
