# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, or cannot write, at every stage of saving: the checkpoint before stays what ``latest`` loads.

A rank is really killed, by SIGKILL from inside the operation of the file system that the stage is known by.
"""
import builtins
import os
import signal
from unittest import mock

import numpy as np
import pytest

from checkpoints import PRELOAD, config, engine_for, state_of, train
from ranks import RankFailure, rank_group

two_ranks = rank_group(2, preload=PRELOAD)
# Apart, as the group is started again after each death.
doomed = rank_group(2, preload=PRELOAD)


def _stage_calls():
    """Stage -> (module, function, does this call belong to the stage)."""
    import torch

    def ends(end):
        return lambda args: str(args[0]).endswith(end)

    return {
        "making the folder": (os, "makedirs", ends(".incomplete")),
        "marking it": (builtins, "open", ends("INCOMPLETE")),
        "model states": (torch, "save", lambda args: "_model_states" in args[1]),
        "optimizer states": (torch, "save", lambda args: "_optim_states" in args[1]),
        "the script": (os, "chmod", ends("zero_to_fp32.py")),
        "taking the mark away": (os, "remove", ends("INCOMPLETE")),
        "first rename": (os, "rename", ends("tag")),
        "second rename": (os, "rename", ends("tag.incomplete")),
        "removing the old one": (os, "rmdir", lambda args: "tag.replaced" in str(args[0])),
        "latest": (os, "replace", ends("latest.incomplete")),
    }


def _striking(stage, act):
    """Call ``act`` in place of the first operation of ``stage`` on this rank."""
    module, function, matches = _stage_calls()[stage]
    real, struck = getattr(module, function), []

    def strike(*args, **kwargs):
        if args and not struck and matches(args):
            struck.append(True)
            act(args)
        return real(*args, **kwargs)

    return mock.patch.object(module, function, strike)


def _die(args):
    if hasattr(args[0], "keys"):  # torch.save: with a part of the file written
        with open(args[1], "wb") as file:
            file.write(b"part")
    os.kill(os.getpid(), signal.SIGKILL)


def _disk_full(args):
    raise OSError(28, "No space left on device")


def saved_twice(folder, tags, stage, rank, act):
    """Save ``tags[0]``, train a step, save ``tags[1]`` and have ``act`` strike on ``rank`` in ``stage`` of that."""
    import deepspeed.comm as dist

    with engine_for(config(2), num_experts=6) as engine:
        train(engine, range(1))
        engine.save_checkpoint(folder, tag=tags[0])
        with open(os.path.join(folder, "weights.npz"), "wb") if dist.get_rank() == 0 else open(os.devnull, "wb") as f:
            np.savez(f, **state_of(engine)["tensors"])
        train(engine, range(1, 2))
        if dist.get_rank() != rank:
            engine.save_checkpoint(folder, tag=tags[1])
            return
        with _striking(stage, act):
            engine.save_checkpoint(folder, tag=tags[1])


def resumed(folder):
    """Steps and weights after loading what ``latest`` names; then train a step, save as ``tag`` and load that.

    Returns:
        tuple: steps and whole weights of what was loaded first, steps of what was saved and loaded then.
    """
    with engine_for(config(2), seed=1, num_experts=6) as engine:
        engine.load_checkpoint(folder)
        found = engine.global_steps, state_of(engine)["tensors"]
        train(engine, range(5, 6))
        engine.save_checkpoint(folder, tag="tag")
        engine.global_steps = 0
        engine.load_checkpoint(folder)
        return *found, engine.global_steps


def refused(folder, tag):
    with engine_for(config(2), num_experts=6) as engine:
        engine.load_checkpoint(folder, tag=tag)


def _assert_first_is_loaded(group, folder):
    weights = dict(np.load(os.path.join(folder, "weights.npz")))
    for steps, found, steps_of_next in group.run(resumed, folder):
        assert (steps, steps_of_next) == (1, 2)
        for name, array in weights.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    with open(os.path.join(folder, "latest")) as file:
        assert file.read() == "tag"
    left = {name for name in os.listdir(folder) if name.startswith(("tag", "first"))}
    assert left <= {"tag", "first"}, left


# Stage, rank, whether a checkpoint of the same tag is there already. Rank 1 takes no part in what is not a shard.
KILLED = [
    ("making the folder", 0, False),
    ("marking it", 0, True),
    ("model states", 1, False),
    pytest.param("optimizer states", 0, True, marks=pytest.mark.slow),
    ("optimizer states", 1, True),
    ("taking the mark away", 0, True),
    ("first rename", 0, True),
    ("second rename", 0, True),
    ("latest", 0, False),
]


@pytest.mark.parametrize("stage, rank, same_tag", KILLED)
def test_killed_while_saving(stage, rank, same_tag, doomed, two_ranks, tmp_path):
    folder = str(tmp_path)
    with pytest.raises(RankFailure, match="died with exit code -9"):
        doomed.run(saved_twice, folder, ("tag" if same_tag else "first", "tag"), stage, rank, _die, timeout=60)
    if os.path.exists(tmp_path / "tag.incomplete" / "INCOMPLETE"):
        for error in two_ranks.errors(refused, folder, "tag.incomplete"):
            assert "tag.incomplete: found INCOMPLETE, so saving was interrupted there" in error, error
    _assert_first_is_loaded(two_ranks, folder)


def test_killed_with_the_new_one_in_place(doomed, two_ranks, tmp_path):
    with pytest.raises(RankFailure, match="died with exit code -9"):
        doomed.run(saved_twice, str(tmp_path), ("tag", "tag"), "removing the old one", 0, _die, timeout=60)
    for steps, _, steps_of_next in two_ranks.run(resumed, str(tmp_path)):
        assert (steps, steps_of_next) == (2, 3)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tag.")]


FULL = [
    ("making the folder", 0),
    ("model states", 0),
    pytest.param("model states", 1, marks=pytest.mark.slow),
    pytest.param("optimizer states", 0, marks=pytest.mark.slow),
    ("optimizer states", 1),
    pytest.param("the script", 0, marks=pytest.mark.slow),
    ("second rename", 0),
    ("latest", 0),
]


@pytest.mark.parametrize("stage, rank", FULL)
def test_full_disk(stage, rank, two_ranks, tmp_path):
    folder = str(tmp_path)
    for error in two_ranks.errors(saved_twice, folder, ("first", "tag"), stage, rank, _disk_full):
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in error, error
    _assert_first_is_loaded(two_ranks, folder)


def saved_with_notes(folder):
    with engine_for(config(2), num_experts=6) as engine:
        for _ in range(2):
            engine.save_checkpoint(folder, tag="tag")
            with open(os.path.join(folder, "tag", "notes.txt"), "a") as file:
                file.write("x")
        for name in ("tag", "tag2"):
            engine.save_checkpoint(folder, tag=name, save_latest=name == "tag")


def test_files_of_others_stay(two_ranks, tmp_path):
    two_ranks.run(saved_with_notes, str(tmp_path))
    assert (tmp_path / "tag" / "notes.txt").read_text() == "x" * 4
    assert (tmp_path / "latest").read_text() == "tag"
