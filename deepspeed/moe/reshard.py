# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Who holds which flat interval of a tensor, and the moves between two placements: numbers only, no messages.

Each rank computes its own part of the plan from shapes alone. The elements that rank ``s`` sends to rank ``t`` are
those in both intervals: ``s``'s of the source tensor and ``t``'s of the target tensor. A flat interval of a box of
elements is at most five boxes (for three axes: part of a row, rows, whole matrices, rows, part of a row), and two
boxes meet in a box, so a pair of ranks exchanges a handful of boxes however large the tensors are and however the
layout permutes them.
"""
import dataclasses
import functools
from math import prod
from typing import NamedTuple, Tuple

import numpy as np

from deepspeed.moe.expert_layout import Layout, Section, row_major


class Placement:
    """Rank ``owners[k]`` holds elements ``[bounds[k], bounds[k + 1])`` of a flat tensor; each rank one interval.

    Args:
        bounds: ascending numbers of elements; they may repeat, where a rank holds nothing.
        owners: ranks, one fewer than bounds.
    """

    def __init__(self, bounds, owners):
        self.bounds = bounds
        self.owners = owners
        self._intervals = dict(zip(owners.tolist(), zip(bounds[:-1].tolist(), bounds[1:].tolist())))

    def interval(self, rank):
        """``(start, stop)`` of what ``rank`` holds."""
        return self._intervals[rank]

    def owners_between(self, start, stop):
        """Ranks that hold an element of ``[start, stop)``, in the order of what they hold."""
        first = np.searchsorted(self.bounds, start, side="right") - 1
        last = np.searchsorted(self.bounds, stop, side="left")
        return self.owners[first:last][np.diff(self.bounds[first:last + 1]) > 0].tolist()


@functools.lru_cache(maxsize=64)
def zero3_placement(numel, world_size):
    """ZeRO-3 over ``world_size`` ranks: each holds ``ceil(numel / world_size)`` elements, the last ones fewer."""
    return expert_placement(numel, [range(world_size)])


def expert_placement(numel, ranks):
    """Expert slices by EP rank, then ZeRO-3 over the ranks that hold the same experts.

    Args:
        numel: elements of the tensor of all experts; divisible by the EP degree, ``len(ranks)``.
        ranks: ``ranks[ep_rank]`` lists the ranks of that expert-data-parallel (EDP) group, in group order.
    """
    return _in_shards(numel, ranks, -(-numel // len(ranks) // len(ranks[0])))


def replicated_expert_placement(numel, ranks):
    """Expert slices by EP rank, whole on every rank of its EDP group; the group's first one stands for all of it.

    Args:
        numel, ranks: as in ``expert_placement``.
    """
    return _in_shards(numel, ranks, numel // len(ranks))


def _in_shards(numel, ranks, shard):
    """Each row of ``ranks`` has an equal slice of the tensor, of which its ranks take ``shard`` elements in turn."""
    slice_numel = numel // len(ranks)
    starts = np.minimum(np.arange(len(ranks[0])) * shard, slice_numel)
    bounds = (np.arange(len(ranks))[:, None] * slice_numel + starts).reshape(-1)
    return Placement(np.append(bounds, numel), np.asarray(ranks).reshape(-1))


def sole_placement(numel, owner, world_size):
    """Rank ``owner`` of ``world_size`` holds the whole tensor: a file that it writes, or what every rank has."""
    bounds = np.zeros(world_size + 1, dtype=np.int64)
    bounds[owner + 1:] = numel
    return Placement(bounds, np.arange(world_size))


class Box(NamedTuple):
    """Elements ``[start, stop)`` along each axis of a section."""
    start: Tuple[int, ...]
    stop: Tuple[int, ...]

    @property
    def shape(self):
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def numel(self):
        return prod(self.shape)


def _meet(one, other):
    """The box that two boxes have in common, or None."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return Box(start, stop) if all(low < high for low, high in zip(start, stop)) else None


def _first_index(shape, strides, at_least):
    """First index of the box, in lexicographic order, whose element lies at ``at_least`` or after it."""
    index, left = [], max(at_least, 0)
    for size, stride, later in zip(shape, strides, range(len(shape) - 1, -1, -1)):
        position = left // stride if later else -(-left // stride)
        if position >= size:  # past the end of this axis: the next element is the first of the next index before
            return _carry(index, shape)
        index.append(position)
        left -= position * stride
    return tuple(index)


def _carry(index, shape):
    while index and index[-1] + 1 >= shape[len(index) - 1]:
        index.pop()
    if not index:
        return None  # past the end of the box
    return (*index[:-1], index[-1] + 1, *([0] * (len(shape) - len(index))))


def _boxes_between(first, last, shape):
    """Disjoint boxes that cover the indices from ``first`` up to, not including, ``last``, in lexicographic order.

    ``last`` None stands for the end. Recursion over axes: the first index's rest, whole indices, the last one's part.
    """
    if first is None:
        return []
    if last is None:
        last = (shape[0], *([0] * (len(shape) - 1)))
    if len(shape) == 1:
        return [Box(first, last)] if first < last else []
    inner = shape[1:]
    zero = (0, ) * len(inner)

    def at(position, boxes):
        return [Box((position, *box.start), (position + 1, *box.stop)) for box in boxes]

    if first[0] == last[0]:
        return at(first[0], _boxes_between(first[1:], last[1:], inner))
    boxes, begin = [], first[0]
    if first[1:] != zero:
        boxes += at(begin, _boxes_between(first[1:], None, inner))
        begin += 1
    if begin < last[0]:
        boxes.append(Box((begin, *zero), (last[0], *inner)))
    if last[1:] != zero:
        boxes += at(last[0], _boxes_between(zero, last[1:], inner))
    return boxes


def boxes_of(shape, strides, start, stop):
    """Boxes of indices whose elements lie in ``[start, stop)`` of the flat tensor, counted from the box's first one.

    ``strides`` order the axes: sorted by stride, the elements must lie in lexicographic order without overlap.
    """
    if stop <= start or stop <= 0:
        return []
    # An axis of one element may have any stride; it goes last, where it orders nothing.
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis] == 1, -strides[axis]))
    sizes = [shape[axis] for axis in order]
    steps = [strides[axis] if shape[axis] > 1 else 1 for axis in order]
    found = _boxes_between(_first_index(sizes, steps, start), _first_index(sizes, steps, stop), tuple(sizes))
    back = [order.index(axis) for axis in range(len(shape))]
    return [Box(tuple(box.start[axis] for axis in back), tuple(box.stop[axis] for axis in back)) for box in found]


@dataclasses.dataclass(frozen=True)
class Move:
    """A box of one section, and the first elements of the shards that it is taken from and written to."""
    section: Section
    box: Box
    source_start: int
    target_start: int

    @property
    def numel(self):
        return self.box.numel

    def source_view(self, shard):
        """The moved elements as a strided view of the flat source shard."""
        return self._view(shard, self.section.source, self.source_start)

    def target_view(self, shard):
        """The moved elements as a strided view of the flat target shard."""
        return self._view(shard, self.section.target, self.target_start)

    def _view(self, shard, side, shard_start):
        offset = shard.storage_offset() + side.at(self.box.start) - shard_start
        return shard.as_strided(self.box.shape, side.strides, offset)

    def part(self, start, stop):
        """The moves that carry elements ``[start, stop)`` of this one, in row-major order of its box."""
        if start <= 0 and stop >= self.numel:
            return [self]
        shape = self.box.shape
        shifted = [
            Box(tuple(map(int.__add__, box.start, self.box.start)), tuple(map(int.__add__, box.stop, self.box.start)))
            for box in boxes_of(shape, row_major(shape), start, stop)
        ]
        return [dataclasses.replace(self, box=box) for box in shifted]


class Plan:
    """What every rank sends and receives to go from one placement of a layout's tensors to another.

    Args:
        layout: the sections, and the shapes of all tensors.
        sources: ``Placement`` of every source tensor, by name.
        targets: ``Placement`` of every target tensor, by name.

    Sender and receiver compute the same moves between them, in the same order.
    """

    def __init__(self, layout: Layout, sources, targets):
        self.layout = layout
        self._sources = sources
        self._targets = targets

    def received(self, rank):
        """What ``rank`` receives, itself included: sending rank -> list of moves."""
        return self._moves_of(rank, receives=True)

    def sent(self, rank):
        """What ``rank`` sends, itself included: receiving rank -> list of moves."""
        return self._moves_of(rank, receives=False)

    def _moves_of(self, rank, receives):
        moves = {}
        for section in self.layout.sections:
            near, far = (section.target, section.source) if receives else (section.source, section.target)
            of_near, of_far = (self._targets, self._sources) if receives else (self._sources, self._targets)
            mine, boxes = _held(section, near, of_near, rank)
            peers = {}
            for box in boxes:
                last = far.at([stop - 1 for stop in box.stop])
                peers.update(dict.fromkeys(of_far[far.tensor].owners_between(far.at(box.start), last + 1)))
            for peer in peers:
                theirs, their_boxes = _held(section, far, of_far, peer)
                ends = (theirs, their_boxes, mine, boxes) if receives else (mine, boxes, theirs, their_boxes)
                between = _between(section, *ends)
                if between:
                    moves.setdefault(peer, []).extend(between)
        return moves


def _held(section, side, placements, rank):
    """First element of the shard of ``side``'s tensor that ``rank`` holds, and the section's boxes in it."""
    start, stop = placements[side.tensor].interval(rank)
    return start, boxes_of(section.shape, side.strides, start - side.offset, stop - side.offset)


def _between(section, source_start, source_boxes, target_start, target_boxes):
    """The moves from one rank to another, in an order that both ends arrive at."""
    met = [_meet(target, source) for target in target_boxes for source in source_boxes]
    return [Move(section, box, source_start, target_start) for box in met if box is not None]
