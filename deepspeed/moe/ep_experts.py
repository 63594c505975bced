# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A replaced block's experts compute tokens with expert numbers, too: ZeRO-3's hooks are on their forward."""
import functools

from deepspeed.moe.expert_activations import recognised
from deepspeed.moe.expert_compute import ExpertWeights, compute_experts
from deepspeed.moe.fast_experts import Routed
from deepspeed_autoep.extension import extends


@extends("GroupedExperts.forward",
         feature="expert-kernels",
         why="tokens with expert numbers are computed without keeping a permuted copy of them")
def forward_of_routed_tokens(self, x, num_tokens_per_expert):
    if not isinstance(num_tokens_per_expert, Routed):
        return forward_of_routed_tokens.original(self, x, num_tokens_per_expert)
    activation = _activation_of(self.activation, self.activation_alpha, self.activation_limit)
    weights = ExpertWeights((self.w1, self.w3), self.w2, activation)
    return compute_experts(weights, x, *num_tokens_per_expert)


@functools.cache
def _activation_of(name, alpha, limit):
    """The formula behind one of DeepSpeed's names, or DeepSpeed's own function of gate and up."""
    from deepspeed.moe.ep_experts import apply_expert_activation

    def apply(gate, up):
        return apply_expert_activation(gate, up, name, alpha, limit, fused=False)

    return recognised(lambda whole: apply(*whole.chunk(2, dim=-1)), True, (alpha, limit)) or apply
