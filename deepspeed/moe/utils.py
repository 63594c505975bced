# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameter groups of models with experts."""
from deepspeed_autoep.extension import extends


@extends("split_params_into_different_moe_groups_for_optimizer",
         feature="unnamed-groups",
         why="groups as torch.optim takes them have no name; DeepSpeed's split into expert groups needs one")
def split_params_into_different_moe_groups_for_optimizer(param_groups, *args, **kwargs):
    for number, group in enumerate([param_groups] if isinstance(param_groups, dict) else param_groups):
        group.setdefault("name", f"group-{number}")
    return split_params_into_different_moe_groups_for_optimizer.original(param_groups, *args, **kwargs)
