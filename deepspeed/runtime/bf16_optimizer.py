# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Experts under ZeRO stage 1 in bf16 with float32 gradients."""
from deepspeed.moe.expert_groups import split_expert_groups
from deepspeed_autoep.extension import extends


@extends("BF16_Optimizer.__init__",
         feature="expert-groups",
         why="an optimizer of the caller's, or frozen experts, leave no group marked as experts, which is refused")
def construct_with_expert_groups(self, init_optimizer, *args, **kwargs):
    if kwargs.get("has_moe_layers"):
        kwargs["has_moe_layers"] = split_expert_groups(init_optimizer)
    construct_with_expert_groups.original(self, init_optimizer, *args, **kwargs)
