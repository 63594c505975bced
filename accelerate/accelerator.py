# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where Accelerate, and so the Trainer, gets the weights that it saves."""
from deepspeed_autoep.extension import extends


@extends("Accelerator.get_state_dict",
         feature="hf-checkpoint",
         why="below ZeRO-3 a rank has the whole model but for other ranks' experts, which are brought to rank 0")
def get_state_dict(self, model, unwrap=True):
    has_experts = getattr(model, "_has_autoep_layers", None)
    if has_experts is None or not has_experts() or model.zero_optimization_partition_weights():
        return get_state_dict.original(self, model, unwrap)
    return model._zero3_consolidated_16bit_state_dict()
