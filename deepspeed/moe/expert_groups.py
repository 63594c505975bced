# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameter groups of their own for experts, in an optimizer that was made without thinking of them.

ZeRO stages 1 and 2 flatten a parameter group and cut it over the ranks that hold the same parameters. Those are fewer
for experts, so that a group may hold experts or other parameters, not both. DeepSpeed splits the groups of the
optimizers that it makes itself; an optimizer of the caller's comes as it is.
"""
import gc

from torch.optim.lr_scheduler import LRScheduler

from deepspeed.moe.utils import (is_moe_param, is_moe_param_group,
                                 split_params_into_different_moe_groups_for_optimizer)
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupLR

# What torch's schedulers and DeepSpeed's keep for every parameter group.
_SCHEDULERS = (LRScheduler, WarmupLR, WarmupCosineLR, OneCycle, LRRangeTest)
PER_GROUP = ("base_lrs", "lr_lambdas", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
             "delta_lrs", "org_lrs", "min_moms", "max_moms", "min_lr")  # yapf: disable


def split_expert_groups(optimizer):
    """Give experts that are trained groups of their own, marked as DeepSpeed asks, unless some group is marked.

    An expert group has the hyperparameters of the group that its parameters were in, also those that a scheduler will
    set: it comes after all others, and the schedulers made before learn of it. A group without a parameter that is
    trained is left out, since ZeRO cannot flatten nothing.

    Args:
        optimizer: a ``torch.optim.Optimizer`` without state yet; its ``param_groups`` are changed in place.

    Returns:
        bool: whether any group holds experts now; not when all are frozen, or left to somebody else.
    """
    groups = optimizer.param_groups
    count, parts = len(groups), list(enumerate(groups))
    if not any(map(is_moe_param_group, groups)):
        parts += [(origin, experts) for origin, group in enumerate(groups) for experts in _split_off(group)]
    parts = [(origin, part) for origin, part in parts if _is_trained(part)]
    groups[:] = [part for _, part in parts]
    origins = [origin for origin, _ in parts]
    if origins != list(range(count)):
        _tell_schedulers(optimizer, count, origins)
    return any(map(is_moe_param_group, groups))


def _split_off(group):
    """Take the experts out of ``group`` and return them in groups; the first ones stay if it has nothing else."""
    if not any(map(is_moe_param, group["params"])):
        return []
    experts = [part for part in split_params_into_different_moe_groups_for_optimizer([group])[1:] if _is_trained(part)]
    if experts and not _is_trained(group):
        group.update(experts.pop(0))
    return experts


def _is_trained(group):
    return any(param.requires_grad for param in group["params"])


def _tell_schedulers(optimizer, count, origins):
    """Let the schedulers of ``optimizer``, made for ``count`` groups, set the groups of now as those at ``origins``.

    The engine does not know all of them: Accelerate keeps a scheduler to itself, and some hold others.

    Raises:
        ValueError: for a scheduler of another number of groups, whose rates would go to the wrong ones.
    """
    for scheduler in [found for found in gc.get_objects() if issubclass(type(found), _SCHEDULERS)]:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        for name in PER_GROUP:
            values = getattr(scheduler, name, None)
            if not isinstance(values, list):
                continue
            if len(values) != count:  # DeepSpeed leaves out empty groups before it comes here
                raise ValueError(f"optimizer: found a {type(scheduler).__name__} with {len(values)} values of {name} "
                                 f"and {count} groups that are not empty; allowed: an optimizer without empty groups")
            setattr(scheduler, name, [values[origin] for origin in origins])
