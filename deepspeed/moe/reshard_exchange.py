# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Carries out a plan: a bucketed all-to-all of exactly the elements that change hands, written into their shards.

What a rank sends to another is one stream of elements. Each round carries the next ``quota`` elements of every stream,
so both ends cut it alike without a message, and the send and the receive buffer together stay within the bucket.
"""
import contextlib
from typing import NamedTuple

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.agreement import agree

DEFAULT_BUCKET_BYTES = 64 * 2**20


def bucket_bytes_of(ds_config):
    """``expert_parallel.reshard_bucket_bytes`` of a DeepSpeed configuration (a dict), or its default."""
    return ds_config.get("expert_parallel", {}).get("reshard_bucket_bytes", DEFAULT_BUCKET_BYTES)


class Traffic(NamedTuple):
    """Bytes that crossed the network from and to this rank, and the number of all-to-alls."""
    sent: int
    received: int
    rounds: int


def exchange(plan, sources, targets, group, bucket_bytes):
    """Fill this rank's shards of the plan's target tensors from all ranks' shards of its source tensors.

    Args:
        plan: a ``Plan`` over the ranks of ``group``, numbered in group order.
        sources: flat shards by tensor name; a shard may be longer than what its placement says (padding).
        targets: flat shards by tensor name, of the same dtype as the sources; written.
        group: process group of all ranks that hold a source or a target.
        bucket_bytes: upper bound of the buffers on this rank, both together; at least one element a peer is sent.

    Returns:
        Traffic.

    Raises:
        FailedOnRank: on every rank, when one of them could not do its part.
    """
    rank = dist.get_rank(group=group)
    failures = []
    longest, peers = 0, 0
    with _kept(failures):
        sends, receives = plan.sent(rank), plan.received(rank)
        _check_dtypes(sources, targets)
        for move in receives.pop(rank, ()):
            move.target_view(targets[move.section.target.tensor]).copy_(
                move.source_view(sources[move.section.source.tensor]))
        sends.pop(rank, None)
        longest = max([_numel(moves) for moves in (*sends.values(), *receives.values())], default=0)
        peers = max(len(sends), len(receives))
    told = agree(group, _first(failures), (peers, longest))
    peers, longest = (max(column) for column in zip(*told))
    if longest == 0:
        return Traffic(0, 0, 0)
    itemsize = next(iter(sources.values())).element_size()
    quota = min(longest, max(1, bucket_bytes // (2 * itemsize * peers)))
    with _kept(failures):
        rounds = _Rounds(sends, receives, sources, targets, quota, dist.get_world_size(group=group))
    agree(group, _first(failures))  # no rank sends before all have their buffers
    for start in range(0, longest, quota):
        rounds.run(start, group, failures)
    agree(group, _first(failures))
    return Traffic(itemsize * sum(map(_numel, sends.values())), itemsize * sum(map(_numel, receives.values())),
                   -(-longest // quota))


@contextlib.contextmanager
def _kept(failures):
    """Keep what is raised inside the block: the other ranks are in, or on their way to, a collective."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def _first(failures):
    return failures[0] if failures else None


def _check_dtypes(sources, targets):
    dtypes = {name: shard.dtype for shards in (sources, targets) for name, shard in shards.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"expert weights: found {dtypes}; allowed: one dtype for all tensors that are moved together")


def _numel(moves):
    return sum(move.numel for move in moves)


def _window(moves, start, stop):
    """The moves that carry elements ``[start, stop)`` of a stream."""
    parts, position = [], 0
    for move in moves:
        if start < position + move.numel and position < stop:
            parts += move.part(start - position, stop - position)
        position += move.numel
    return parts


class _Rounds:
    """The buffers of an exchange and what one round does with them."""

    def __init__(self, sends, receives, sources, targets, quota, world_size):
        self.quota, self.world_size = quota, world_size
        self.sources, self.targets = sources, targets
        self.sends, self.receives = sends, receives
        dtype = next(iter(sources.values())).dtype
        self.send_buffer, self.receive_buffer = (torch.empty(sum(min(quota, _numel(moves)) for moves in side.values()),
                                                             dtype=dtype,
                                                             device=get_accelerator().current_device_name())
                                                 for side in (sends, receives))  # yapf: disable

    def run(self, start, group, failures):
        """Exchange elements ``[start, start + quota)`` of every stream."""
        outgoing = {peer: _window(self.sends[peer], start, start + self.quota) for peer in sorted(self.sends)}
        incoming = {peer: _window(self.receives[peer], start, start + self.quota) for peer in sorted(self.receives)}
        with _kept(failures):
            for move, buffer in self._slots(outgoing, self.send_buffer):
                buffer.copy_(move.source_view(self.sources[move.section.source.tensor]))
        sent, received = self._splits(outgoing), self._splits(incoming)
        dist.all_to_all_single(self.receive_buffer.view(torch.uint8)[:sum(received)],
                               self.send_buffer.view(torch.uint8)[:sum(sent)],
                               output_split_sizes=received,
                               input_split_sizes=sent,
                               group=group)
        with _kept(failures):
            for move, buffer in self._slots(incoming, self.receive_buffer):
                move.target_view(self.targets[move.section.target.tensor]).copy_(buffer)

    def _splits(self, moves_by_peer):
        size = self.send_buffer.element_size()
        return [size * _numel(moves_by_peer.get(peer, ())) for peer in range(self.world_size)]

    @staticmethod
    def _slots(moves_by_peer, buffer):
        position = 0
        for moves in moves_by_peer.values():
            for move in moves:
                yield move, buffer[position:position + move.numel].view(move.box.shape)
                position += move.numel
