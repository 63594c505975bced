# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Groups of real processes that run one function on every rank, for tests.

A group is started once per test module and serves many tests: DeepSpeed takes seconds to import. A rank that raises,
dies or takes too long fails the test and ends the whole group, so that nothing hangs; the next test gets a new one.
"""
import os
import socket
import traceback
from multiprocessing import get_context
from unittest import mock

import pytest


class RankFailure(AssertionError):
    """Some rank raised, died or took too long; the message has every rank's report."""


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe, environment):
    os.environ.update(environment)  # for a preloaded rank, which was forked from a process with another one
    import torch
    torch.set_num_threads(1)
    import deepspeed
    torch.distributed.init_process_group("gloo")  # by ourselves: ranks that share one GPU could make no sub-group
    deepspeed.init_distributed("gloo")
    pipe.send((True, "ready"))
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args, kwargs = task
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    torch.distributed.destroy_process_group()


class RankGroup:
    """``world_size`` processes joined in a gloo process group.

    Args:
        world_size: number of ranks.
        environment: extra environment variables of the ranks, such as ``{"DS_AUTOEP_OFF": "force-persist"}``.
        preload: modules that one process imports, from which ranks are forked: a group that is started again and again
            starts in a second. For groups without an environment of their own.
    """

    def __init__(self, world_size: int, environment: dict = {}, preload: tuple = ()):
        assert not (environment and preload)
        self.world_size = world_size
        self._environment = environment
        self._preload = preload
        self._workers = []

    def _start(self):
        context = get_context("forkserver" if self._preload else "spawn")
        if self._preload:
            context.set_forkserver_preload(list(self._preload))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.world_size),
                  "LOCAL_SIZE": "8", "DS_ACCELERATOR": "cpu", **self._environment}  # yapf: disable
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            # Inherited, not only set by the child: its start-up line and its imports come before any code of ours.
            with mock.patch.dict(os.environ, environment):
                process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._raise_if_failed(self._answers(timeout=300))  # imports, and once the build of DeepSpeed's C++ operator

    def run(self, function, *args, timeout: float = 120, **kwargs) -> list:
        """Call ``function(*args, **kwargs)``, a module-level function, on every rank; return the results by rank."""
        results = self._outcomes(function, args, kwargs, timeout)
        self._raise_if_failed(results)
        return [value for _, value in results]

    def errors(self, function, *args, timeout: float = 20, **kwargs) -> list:
        """Like ``run``, for a function that must raise on every rank: return ``"Type: message"`` by rank."""
        results = self._outcomes(function, args, kwargs, timeout)
        passed = [rank for rank, (ok, _) in enumerate(results) if ok]
        if passed:
            self.close()
            raise RankFailure(f"ranks {passed} did not raise")
        return [value.split("\n")[0] for _, value in results]

    def _outcomes(self, function, args, kwargs, timeout):
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, kwargs))
        return self._answers(timeout)

    def _raise_if_failed(self, results):
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(results) if not ok]
        if failed:
            self.close()
            raise RankFailure("\n".join(failed))

    def _answers(self, timeout):
        results = []
        for rank, (process, pipe) in enumerate(self._workers):
            try:
                if not pipe.poll(timeout):
                    report = f"no answer within {timeout} s (a stale lock in ~/.cache/torch_extensions?)"
                    self._raise_if_failed([*results, (False, report)])
                results.append(pipe.recv())
            except EOFError:
                process.join(timeout=5)  # its exit code comes a little later than the end of its pipe
                results.append((False, f"died with exit code {process.exitcode}"))
        return results

    def close(self):
        """End every rank; the group starts again when it is next used."""
        for process, pipe in self._workers:
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
        self._workers = []


def rank_group(world_size: int, preload: tuple = (), **environment):
    """A module-scoped fixture that yields a ``RankGroup``: ``two_ranks = rank_group(2)`` in a test module."""

    @pytest.fixture(scope="module")
    def group():
        made = RankGroup(world_size, environment, preload)
        yield made
        made.close()

    return group
