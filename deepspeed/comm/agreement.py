# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks agree that all of them got this far, so that a failure on one ends the job on all and none waits forever."""
import contextlib

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator


class FailedOnRank(RuntimeError):
    """A step failed on one rank of a group; raised on all of them. The message carries that rank's error."""


def agree(group, failure=None, numbers=(0, 0)):
    """Tell every rank of ``group`` how this one fares. A rank that failed calls it in place of its next collective.

    Args:
        group: process group; all its ranks must call.
        failure: the exception that this rank ran into, or None.
        numbers: two integers to tell the others.

    Returns:
        The numbers of every rank, in group order: a list of pairs.

    Raises:
        FailedOnRank: on every rank, when at least one has failed. When all failed alike, each raises its own error.
    """
    device = get_accelerator().current_device_name()
    mine = torch.tensor([failure is not None, *numbers], dtype=torch.int64, device=device)
    told = torch.empty(dist.get_world_size(group=group) * len(mine), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(told, mine, group=group)
    failed, *columns = told.view(-1, len(mine)).T.tolist()
    if any(failed):
        reports = [None] * len(failed)
        dist.all_gather_object(reports, failure and f"{type(failure).__name__}: {failure}", group=group)
        if len(set(reports)) == 1:
            raise failure
        told_by = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
        raise FailedOnRank("\n".join(told_by)) from failure
    return list(zip(*columns))


@contextlib.contextmanager
def failing_together(group):
    """End the block on all ranks of ``group`` when it fails on one. Collectives inside it are to be agreed upon."""
    failure = None
    try:
        yield
    except FailedOnRank:  # they know already
        raise
    except Exception as error:
        failure = error
    agree(group, failure)
