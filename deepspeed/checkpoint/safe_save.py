# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A checkpoint is there whole or not at all, whenever a rank is killed and wherever the disk fills up.

All ranks write to ``<tag>.incomplete``, which holds a marker file that loading refuses. When all have finished, one of
them takes the marker away and renames the folder; only then ``latest`` names it. A checkpoint of the same tag makes
room by a rename, so that it is there until the new one is::

    written so far             <tag>            <tag>.incomplete   <tag>.replaced     what loading <tag> takes
    shards                     old, or none     new, marked        -                  <tag>
    all of them                old, or none     new                -                  <tag>
    first rename               -                new                old                <tag>.replaced
    second rename              new              -                  old                <tag>
    end                        new              -                  -                  <tag>
"""
import contextlib
import os
import shutil
import zlib
from contextvars import ContextVar

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX
from deepspeed.comm.agreement import agree, failing_together
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

MARKER = "INCOMPLETE"
_failures = ContextVar("failures", default=None)


def can_save_safely(engine):
    """Whether ``engine`` has written its files when saving returns; other ways to write have commits of their own."""
    return isinstance(engine.checkpoint_engine, TorchCheckpointEngine)


@contextlib.contextmanager
def saving_whole(engine, save_dir, tag, save_latest):
    """Save ``tag`` in the block under the tag that it yields, without ``latest``; all ranks together.

    Raises:
        FailedOnRank: on every rank, when writing failed on one of them. The checkpoint is then as if never begun.
    """
    group = dist.get_world_group()
    written = os.path.join(save_dir, f"{tag}.incomplete")
    makes_folders = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    tags = agree(group, numbers=(zlib.crc32(tag.encode()), 0))
    if len(set(tags)) > 1:
        raise ValueError(
            f"save_checkpoint: found tag {tag!r} on this rank and another one elsewhere; allowed: one tag "
            "for all ranks, whose parts make one checkpoint")
    with failing_together(group):
        if makes_folders:
            _begin(save_dir, tag, written)
    token = _failures.set([])
    try:
        yield os.path.basename(written)
        with failing_together(group):
            for failure in _failures.get():
                raise failure
    except Exception:
        if makes_folders:  # no rank writes any more
            shutil.rmtree(written, ignore_errors=True)
        raise
    finally:
        _failures.reset(token)
    with failing_together(group):
        if makes_folders:
            _publish(save_dir, tag, written)
        if save_latest and engine.global_rank == 0:
            _write_latest(save_dir, tag)


@contextlib.contextmanager
def failing_later():
    """Keep an error inside the block until all ranks have passed the collectives of the save that it belongs to."""
    failures = _failures.get()
    try:
        yield
    except Exception as error:
        if failures is None:
            raise
        failures.append(error)


def _replaced(save_dir, tag):
    return os.path.join(save_dir, f"{tag}.replaced")


def _begin(save_dir, tag, written):
    target = os.path.join(save_dir, tag)
    if not os.path.exists(target) and os.path.isdir(_replaced(save_dir, tag)):  # killed between the two renames
        os.rename(_replaced(save_dir, tag), target)
    for left_over in (written, _replaced(save_dir, tag)):
        if os.path.isdir(left_over):
            shutil.rmtree(left_over)
    os.makedirs(written)
    with open(os.path.join(written, MARKER), "w") as file:
        file.write("Some rank has not finished writing this checkpoint.\n")


def _publish(save_dir, tag, written):
    target, old = os.path.join(save_dir, tag), _replaced(save_dir, tag)
    os.remove(os.path.join(written, MARKER))
    if os.path.isdir(target):
        os.rename(target, old)
    os.rename(written, target)
    if os.path.isdir(old):
        _keep_files_of_others(old, target)
        shutil.rmtree(old)


def _keep_files_of_others(old, target):
    """Move what is no shard of a checkpoint, as notes that a script put beside it, to the folder that takes over."""
    for name in set(os.listdir(old)) - set(os.listdir(target)):
        if not name.endswith((MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX)):
            os.rename(os.path.join(old, name), os.path.join(target, name))


def _write_latest(save_dir, tag):
    latest = os.path.join(save_dir, "latest")
    with open(f"{latest}.incomplete", "w") as file:
        file.write(tag)
    os.replace(f"{latest}.incomplete", latest)


def saved_tag(load_dir, tag):
    """The tag to load: ``tag``, or what ``latest`` names; None without either.

    Where saving was killed while one checkpoint took the place of another of the same tag, it is the old one's folder.
    """
    if tag is None:
        try:
            with open(os.path.join(load_dir, "latest")) as file:
                tag = file.read().strip()
        except FileNotFoundError:
            return None
    tag = str(tag)
    if not os.path.isdir(os.path.join(load_dir, tag)) and os.path.isdir(_replaced(load_dir, tag)):
        return os.path.basename(_replaced(load_dir, tag))
    return tag


def check_finished(folder):
    """Raise ValueError for a checkpoint of which some rank has not written its part."""
    if os.path.exists(os.path.join(folder, MARKER)):
        raise ValueError(f"{folder}: found {MARKER}, so saving was interrupted there; allowed: a checkpoint that all "
                         "ranks finished, such as the one that the file latest names")
