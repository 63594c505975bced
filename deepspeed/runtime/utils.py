# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The length of all gradients when each rank has some of the experts only."""
import torch

import deepspeed.comm as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from deepspeed_autoep.extension import extends


@extends("clip_grad_norm_",
         feature="expert-norm",
         why="without ZeRO gradients were clipped by the average of the ranks' norms, which lack other ranks' experts")
def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    found = [param for param in found if param.grad is not None]
    if mpu is not None or float(norm_type) == float("inf") or not any(map(is_moe_param, found)):
        return clip_grad_norm_.original(found, max_norm, norm_type, mpu)
    # Ranks with the same experts agree on their gradients, so the mean over all ranks of `degree` times a rank's share
    # is the sum over the EP group; the mean of what all ranks agree on is itself.
    total = torch.zeros((), device=found[0].grad.device)
    for param in found:
        degree = groups._get_expert_parallel_world_size(param.group_name) if is_moe_param(param) else 1
        total += degree * param.grad.detach().float().norm(norm_type)**norm_type
    everyone = groups._get_data_parallel_group()
    dist.all_reduce(total, group=everyone)
    norm = (total / dist.get_world_size(group=everyone))**(1 / norm_type)
    torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
    return norm
