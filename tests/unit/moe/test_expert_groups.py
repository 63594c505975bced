# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Experts get groups of their own, with the hyperparameters and the schedule of the group that they were in."""
import functools

import pytest
import torch
from deepspeed.moe.expert_groups import split_expert_groups
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR
from torch.optim import lr_scheduler

pytestmark = pytest.mark.floor

RATES = [0.5, 0.25, 0.125]


def parameter(expert=False, trained=True):
    param = torch.nn.Parameter(torch.ones(2), requires_grad=trained)
    if expert:
        param.allreduce, param.group_name = False, "ep_size_2"
    return param


def optimizer_of(*groups):
    return torch.optim.AdamW([dict(params=params, lr=rate) for params, rate in zip(groups, RATES)])


def described(optimizer):
    return [(group["params"], group["lr"], group.get("moe", False) and group["name"])
            for group in optimizer.param_groups]


def same(found, expected):
    return [(*map(id, params), *rest) for params, *rest in found] == \
        [(*map(id, params), *rest) for params, *rest in expected]


def test_a_group_of_both_is_split():
    norm, expert, bias, other, frozen = (parameter(), parameter(True), parameter(), parameter(True),
                                         parameter(True, trained=False))  # yapf: disable
    optimizer = optimizer_of([norm, expert, frozen], [bias], [other])
    assert split_expert_groups(optimizer)
    assert same(described(optimizer), [([norm], 0.5, False), ([bias], 0.25, False), ([other], 0.125, "ep_size_2"),
                                       ([expert, frozen], 0.5, "ep_size_2")])  # yapf: disable


def test_a_schedule_of_other_groups_is_refused():
    """DeepSpeed takes empty groups away first; the experts' new group would get the empty one's rate."""
    optimizer = torch.optim.AdamW([dict(params=[parameter(), parameter(True)], lr=0.5), dict(params=[], lr=0.1)])
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    del optimizer.param_groups[1]
    with pytest.raises(ValueError, match="found a LambdaLR with 2 values of base_lrs and 1 groups that are not empty"):
        split_expert_groups(optimizer)
    del schedule


def test_groups_that_are_marked_stay():
    norm, expert = parameter(), parameter(True)
    optimizer = optimizer_of([norm], [expert])
    optimizer.param_groups[1].update(moe=True, name="ep_size_2")
    before = described(optimizer)
    assert split_expert_groups(optimizer) and same(described(optimizer), before)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_frozen_experts_need_no_group(alone, marked):
    norm, frozen = parameter(), parameter(True, trained=False)
    optimizer = optimizer_of([frozen], [norm]) if alone else optimizer_of([norm, frozen])
    if marked:  # by DeepSpeed, which does not ask whether they are trained
        optimizer = optimizer_of([frozen], [norm])
        optimizer.param_groups[0].update(moe=True, name="ep_size_2")
    assert not split_expert_groups(optimizer)
    assert same(described(optimizer), [([norm], 0.25 if alone or marked else 0.5, False)])


def sequential(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.LinearLR(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.5),
         lr_scheduler.StepLR(optimizer, 2)])


LAMBDAS = [lambda step: 0.5**step, lambda step: 1 / (1 + step)]
SCHEDULERS = {
    "lambda": functools.partial(lr_scheduler.LambdaLR, lr_lambda=LAMBDAS),
    "multiplicative": functools.partial(lr_scheduler.MultiplicativeLR, lr_lambda=LAMBDAS),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "restarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "polynomial": lr_scheduler.PolynomialLR,
    "cyclic": functools.partial(lr_scheduler.CyclicLR, base_lr=[0.1, 0.2], max_lr=[0.3, 0.5], step_size_up=2,
                                cycle_momentum=False),
    "one cycle": functools.partial(lr_scheduler.OneCycleLR, max_lr=[0.3, 0.5], total_steps=6),
    "plateau": functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0, min_lr=[0.2, 0.01]),
    "sequential": sequential,
    "chained": chained,
    "DeepSpeed's warm-up": functools.partial(WarmupDecayLR, total_num_steps=6, warmup_num_steps=3,
                                             warmup_max_lr=[0.5, 0.25]),
    "DeepSpeed's cosine": functools.partial(WarmupCosineLR, total_num_steps=6, warmup_num_steps=3),
}  # yapf: disable


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_made_before_sets_experts_as_the_others(kind):
    optimizer = optimizer_of([parameter(), parameter(True)], [parameter(), parameter(True)])
    scheduler, seen = SCHEDULERS[kind](optimizer), set()
    assert split_expert_groups(optimizer) and len(optimizer.param_groups) == 4
    for _ in range(4):
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))
        first, second, *experts = (group["lr"] for group in optimizer.param_groups)
        assert experts == [first, second]
        seen.add(tuple(experts))
    assert len(seen) > 1, "the schedule never changed anything"


def test_a_scheduler_forgets_a_group_that_is_left_out():
    optimizer = optimizer_of([parameter(True, trained=False)], [parameter(), parameter(True)])
    scheduler = lr_scheduler.LambdaLR(optimizer, LAMBDAS)
    assert split_expert_groups(optimizer)
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [RATES[1] / 3] * 2
