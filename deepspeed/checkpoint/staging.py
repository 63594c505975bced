# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A Hugging Face checkpoint takes its place in a folder only when all of it is written.

Files are written to ``<folder>/.incomplete``. When every rank is done, the weights that were in the folder move to
``<folder>/.previous``, the new files move in, the index last, and ``.previous`` is removed. A folder without an index
is not taken for a checkpoint. Files move one by one: after a kill while the old ones move, those in ``.previous`` and
those left in the folder are the old checkpoint together; later, ``.previous`` holds it whole.
"""
import contextlib
import os
import re
import shutil

import deepspeed.comm as dist
from deepspeed.comm.agreement import failing_together

INCOMPLETE, PREVIOUS = ".incomplete", ".previous"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextlib.contextmanager
def staged(folder, group):
    """Yield the path to write files to that belong into ``folder``; every rank of ``group`` must enter.

    Raises:
        FailedOnRank: on every rank, when the block fails on one; ``folder`` is then as it was before.
    """
    staging = os.path.join(folder, INCOMPLETE)
    writes = dist.get_rank(group=group) == 0
    try:
        with failing_together(group):
            if writes:
                shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
                os.makedirs(staging)
        with failing_together(group):
            yield staging
        with failing_together(group):
            if writes:
                _move_in(staging, folder)
    except BaseException:
        if writes:
            _put_back(folder)
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _entry_last(name):
    """Sorts the file by which a checkpoint is found, its entry, behind all others."""
    return name in (SINGLE_FILE, INDEX_FILE), name


def _put_back(folder):
    """Undo what ``_move_in`` did before it failed."""
    previous = os.path.join(folder, PREVIOUS)
    if os.path.isdir(previous):
        for name in sorted(os.listdir(previous), key=_entry_last):
            os.rename(os.path.join(previous, name), os.path.join(folder, name))
        os.rmdir(previous)


def _move_in(staging, folder):
    previous = os.path.join(folder, PREVIOUS)
    old = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name)]
    if os.path.isdir(previous):  # a save was killed right here: what is in the folder is no checkpoint
        for name in old:
            os.remove(os.path.join(folder, name))
    elif old:
        os.makedirs(previous)
        for name in sorted(old, key=_entry_last, reverse=True):
            os.rename(os.path.join(folder, name), os.path.join(previous, name))
        if os.path.isfile(os.path.join(folder, "config.json")):
            shutil.copy(os.path.join(folder, "config.json"), previous)
    for name in sorted(os.listdir(staging), key=_entry_last):
        os.replace(os.path.join(staging, name), os.path.join(folder, name))
    shutil.rmtree(previous, ignore_errors=True)
    os.rmdir(staging)
