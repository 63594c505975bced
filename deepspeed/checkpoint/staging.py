# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A Hugging Face checkpoint takes its place in a folder only when all of it is written.

Files are written to ``<folder>/.incomplete``. When every rank is done, the weights that are in the folder get a second
name in ``<folder>/.previous``, leave the folder, the new files move in, and ``.previous`` is removed. A checkpoint
is found by its entry, the index or the only file, which comes last and goes first. So whenever a rank is killed, one
that has an entry is whole: the folder, or else ``.previous``::

    killed                       folder           .previous
    while files are written      old              -
    while .previous is made      old              part of old, no entry
    while weights change         no entry         old
    while .previous is removed   new              old, or part of it
"""
import contextlib
import errno
import os
import re
import shutil

import deepspeed.comm as dist
from deepspeed.comm.agreement import failing_together

INCOMPLETE, PREVIOUS = ".incomplete", ".previous"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# What file systems without hard links say.
_ONE_NAME_ONLY = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


@contextlib.contextmanager
def staged(folder, group=None):
    """Yield the path to write files to that belong into ``folder``; every rank of ``group`` must enter.

    Without a group, this process is alone and raises errors as they are.

    Raises:
        FailedOnRank: on every rank, when the block fails on one; ``folder`` is then as it was before.
    """
    staging = os.path.join(folder, INCOMPLETE)
    writes = group is None or dist.get_rank(group=group) == 0
    try:
        with _together(group):
            if writes:
                shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
                os.makedirs(staging)
        with _together(group):
            yield staging
        with _together(group):
            if writes:
                _move_in(staging, folder)
    except BaseException:
        if writes:
            _put_back(folder)
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _together(group):
    return contextlib.nullcontext() if group is None else failing_together(group)


def _entry_last(name):
    """Sorts the file by which a checkpoint is found, its entry, behind all others."""
    return name in (SINGLE_FILE, INDEX_FILE), name


def _remove_weights(folder):
    for name in sorted(filter(_WEIGHTS.fullmatch, os.listdir(folder)), key=_entry_last, reverse=True):
        os.remove(os.path.join(folder, name))


def _has_entry(folder):
    return any(os.path.isfile(os.path.join(folder, name)) for name in (SINGLE_FILE, INDEX_FILE))


def _put_back(folder):
    """Undo what ``_move_in`` did before it failed."""
    previous = os.path.join(folder, PREVIOUS)
    if not os.path.isdir(previous):
        return
    if not _has_entry(folder):
        _remove_weights(folder)
        for name in sorted(os.listdir(previous), key=_entry_last):
            os.rename(os.path.join(previous, name), os.path.join(folder, name))
    shutil.rmtree(previous)


def _move_in(staging, folder):
    previous = os.path.join(folder, PREVIOUS)
    if _has_entry(folder):
        shutil.rmtree(previous, ignore_errors=True)  # of a save that was killed
        _name_again(folder, previous)
    _remove_weights(folder)
    for name in sorted(os.listdir(staging), key=_entry_last):
        os.replace(os.path.join(staging, name), os.path.join(folder, name))
    shutil.rmtree(previous, ignore_errors=True)
    os.rmdir(staging)


def _name_again(folder, previous):
    """Give what is a checkpoint in ``folder`` second names in ``previous``; a copy where files can have only one."""
    os.makedirs(previous)
    if os.path.isfile(os.path.join(folder, "config.json")):
        shutil.copy(os.path.join(folder, "config.json"), previous)
    for name in sorted(filter(_WEIGHTS.fullmatch, os.listdir(folder)), key=_entry_last):
        path = os.path.realpath(os.path.join(folder, name))  # a folder of the Hub's cache consists of links
        try:
            os.link(path, os.path.join(previous, name))
        except OSError as error:
            if error.errno not in _ONE_NAME_ONLY:
                raise
            shutil.copy(path, os.path.join(previous, name))
