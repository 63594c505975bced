# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Plans for many ranks: shapes of public models, their EP degrees, and how ranks are laid out in groups."""
from math import prod

import numpy as np

from deepspeed.moe.reshard import Plan, expert_placement, zero3_placement

MODELS = {  # experts, intermediate size, hidden size of one MoE layer
    "DeepSeek-V3": (256, 2048, 7168),
    "Qwen3-235B-A22B": (128, 1536, 4096),
    "Mixtral-8x22B": (8, 16384, 6144),
}


def degrees(experts, world):
    return [ep for ep in range(1, world + 1) if world % ep == 0 and experts % ep == 0]


def grid(world, ep, strided=False):
    """``[ep_rank][edp_rank] -> rank``: EP groups of consecutive ranks, or of ranks that lie ``world / ep`` apart."""
    ranks = np.arange(world).reshape(world // ep, ep).T
    return (np.arange(world).reshape(ep, world // ep) if strided else ranks).tolist()


def plan_of(layout, world, ranks):
    return Plan(layout, {
        name: zero3_placement(prod(shape), world)
        for name, shape in layout.sources.items()
    }, {
        name: expert_placement(prod(shape), ranks)
        for name, shape in layout.targets.items()
    })
