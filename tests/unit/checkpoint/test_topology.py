# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint resumes on another number of ranks, another expert-parallel degree, and with or without EP."""
import numpy as np
import pytest
import torch

from checkpoints import PRELOAD, assert_same_state, config, loaded_run, saved_run
from ranks import rank_group

two_ranks = rank_group(2, preload=PRELOAD)
four_ranks = rank_group(4, preload=PRELOAD)


@pytest.fixture(scope="module")
def saved(two_ranks, four_ranks, tmp_path_factory):
    """``saved(N, EP, experts)``: folder and results of a run that was saved there; each made once."""
    made = {}

    def run(ranks, autoep_size, experts):
        key = ranks, autoep_size, experts
        if key not in made:
            folder = str(tmp_path_factory.mktemp("saved"))
            group = {2: two_ranks, 4: four_ranks}[ranks]
            made[key] = folder, group.run(saved_run, folder, config(autoep_size), num_experts=experts)[0]
        return made[key]

    return run


# saved (N, EP), loaded (N, EP), experts, sub_group_size of the loading engine. EP None: no expert_parallel block. Six
# experts leave the shards of three uneven, four are for EP=4.
CASES = {
    "fewer ranks": ((4, 2), (2, 2), 6, None),
    "fewer ranks, EP off by degree": ((4, 2), (2, 1), 6, 3000),
    "lower degree": ((4, 4), (4, 1), 4, None),
    "more ranks and degree": ((2, 2), (4, 4), 4, 3000),
    "EP off": ((4, 2), (4, None), 6, None),
    "EP off, fewer ranks": ((4, 2), (2, None), 6, 3000),
    "EP on": ((2, None), (2, 2), 6, None),
    "EP on, more ranks": ((2, None), (4, 2), 6, 3000),
    "other sub-groups": ((4, 2), (4, 2), 6, 3000),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.floor if name == "fewer ranks" else [])
                                  for name in CASES])  # yapf: disable
def test_training_goes_on(case, saved, two_ranks, four_ranks):
    (ranks, autoep_size), (to_ranks, to_size), experts, sub_group_size = CASES[case]
    folder, expected = saved(ranks, autoep_size, experts)
    zero = {} if sub_group_size is None else {"sub_group_size": sub_group_size}
    group = {2: two_ranks, 4: four_ranks}[to_ranks]
    for found in group.run(loaded_run, folder, config(to_size, zero), num_experts=experts):
        assert found["note"] == [1, 2]
        assert_same_state(found["state"], expected["state"])
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6)


def test_a_schedule_keeps_the_rate_of_each_group():
    """Two saved groups become three, of which the last comes from the first; torch's schedules count groups."""
    from deepspeed.checkpoint.zero3_load import _schedule

    def scheduler(rates):
        optimizer = torch.optim.SGD([dict(params=[torch.nn.Parameter(torch.ones(1))], lr=rate) for rate in rates])
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                 torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]  # yapf: disable
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    def rates_of(optimizer, schedule, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    saved, loaded = scheduler([1.0, 0.1]), scheduler([1.0, 0.1, 1.0])
    rates_of(*saved, 1)
    rates = [group["lr"] for group in saved[0].param_groups]
    loaded[1].load_state_dict(_schedule(saved[1].state_dict(), 2, [0, 1, 0]))
    for group, origin in zip(loaded[0].param_groups, [0, 1, 0]):
        group["lr"] = rates[origin]
    assert rates_of(*loaded, 4) == [[one, other, one] for one, other in rates_of(*saved, 4)]
