# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which elements of which given tensors a computed tensor consists of, found by computing without contents.

Tensors on the meta device have shapes, strides and offsets, but no elements. A view of one tells by its strides which
elements it is made of. What makes new memory of the same elements (``cat``, ``stack``, ``contiguous``, ``reshape``) is
followed here: the new memory is remembered as the sections of the given tensors that it was made of.
"""
import dataclasses
from math import prod
from typing import NamedTuple, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deepspeed.moe.expert_layout import Section, Side, row_major

_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack)
# What returns the same elements in the same (row-major) order, in memory of their own where a view cannot.
_COPYING = (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.reshape, torch.reshape,
            torch.Tensor.flatten, torch.flatten)  # yapf: disable


class Origin(NamedTuple):
    """What a block of memory was made of.

    Attributes:
        sections: from given tensors to this memory, which they fill; None when its elements were computed.
        inputs: names of the given tensors.
    """
    sections: Optional[Tuple[Section, ...]]
    inputs: Tuple[str, ...]


class Origins(TorchFunctionMode):
    """Inside the block, follows what is computed from ``tensors``: name -> meta tensor with memory of its own."""

    def __init__(self, tensors):
        super().__init__()
        self._origins = {}  # memory -> Origin
        self._alive = []  # memory by whose identity origins are known
        for name, tensor in tensors.items():
            self._remember(tensor, Origin((_copy(tensor.shape, Side(name, 0, row_major(tensor.shape))), ), (name, )))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _writes(func):
            self._remember(args[0], Origin(None, self._inputs(given)))
        for made in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and given]:
            if memory_of(made) not in self._origins:
                self._remember(made, Origin(self._followed(func, made, args, kwargs), self._inputs(given)))
        return result

    def of(self, tensor):
        """``Origin`` of the elements of ``tensor`` in row-major order; empty if it is not made of given tensors."""
        origin = self._origins.get(memory_of(tensor), Origin(None, ()))
        if origin.sections is None or _is_whole(tensor):
            return origin
        if len(origin.sections) == 1 and _is_copy(origin.sections[0]):  # a view of one tensor, whatever its strides
            source = origin.sections[0].source
            offset = source.offset + tensor.storage_offset()
            return origin._replace(sections=(_copy(tensor.shape, Side(source.tensor, offset, tensor.stride())), ))
        if 0 in tensor.stride():  # elements that are there several times
            return origin._replace(sections=None)
        axes = zip(tensor.shape, tensor.stride(), row_major(tensor.shape))
        return origin._replace(sections=through(origin.sections, View(tuple(axes), tensor.storage_offset(), 0)))

    def _remember(self, tensor, origin):
        self._origins[memory_of(tensor)] = origin
        self._alive.append(tensor)

    def _inputs(self, tensors):
        names = [name for tensor in tensors for name in self._origins.get(memory_of(tensor), Origin(None, ())).inputs]
        return tuple(dict.fromkeys(names))

    def _followed(self, func, made, args, kwargs):
        if func in _COPYING:
            return _placed(self.of(args[0]).sections, made.shape, made)
        if func in _JOINING:
            return self._joined(made, *args, stacks=func is torch.stack, **kwargs)
        return None

    def _joined(self, made, parts, dim=0, *, stacks, **unknown):
        if unknown or any(part.dtype != made.dtype for part in parts):
            return None
        found, start = [], 0
        for part in parts:
            size = 1 if stacks else part.shape[dim]
            slot = made.select(dim, start) if stacks else made.narrow(dim, start, size)
            start += size
            placed = _placed(self.of(part).sections, part.shape, slot)
            if placed is None:
                return None
            found.extend(placed)
        return tuple(found)


def _writes(func):
    """Whether ``func`` changes elements of its first argument in place."""
    name = func.__name__
    return name == "__setitem__" or name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _placed(sections, shape, slot):
    """``sections`` that fill a tensor of ``shape`` in row-major order, now filling the view ``slot`` of a memory."""
    axes = zip(shape, row_major(shape), slot.stride())
    return through(sections, View(tuple(axes), 0, slot.storage_offset()))


def memory_of(tensor):
    """What is equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def _is_whole(tensor):
    """Whether ``tensor`` is all of its memory in row-major order."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.is_contiguous() and tensor.numel() == numel


def _copy(shape, source):
    """The section by which a tensor of ``shape`` is a copy of ``source``; a scalar has one axis of one element."""
    shape = tuple(shape) or (1, )
    if len(source.strides) < len(shape):
        source = dataclasses.replace(source, strides=(1, ))
    return Section(shape, Side("", 0, row_major(shape)), source)


def _is_copy(section):
    return section.target.offset == 0 and section.target.strides == section.source.strides == row_major(section.shape)


class View(NamedTuple):
    """A box of elements in two flat orders.

    Attributes:
        axes: ``(size, stride before, stride after)`` of each.
        before, after: where the first element lies.
    """
    axes: Tuple[Tuple[int, int, int], ...]
    before: int
    after: int


def through(sections, view):
    """The parts of ``sections`` in the view, with targets in its order after; None when they are no boxes of it."""
    if sections is None:
        return None
    inside = tuple(found for found in (_one_through(section, view) for section in sections) if found is not None)
    numel = prod(size for size, _, _ in view.axes)
    if sum(prod(section.shape) for section in inside) == numel:
        return inside
    around = (_part(section, view) for section in sections)
    return next(((found, ) for found in around if found is not None), None)


def _part(section, view):
    """The part of ``section`` that is the view, which lies inside it; None when it does not."""
    sizes, before, after = zip(*view.axes) if view.axes else ((1, ), (1, ), (1, ))
    box = Section(sizes, dataclasses.replace(section.target, offset=view.before, strides=before),
                  dataclasses.replace(section.target, offset=view.after, strides=after))  # yapf: disable
    axes = zip(section.shape, section.target.strides, section.source.strides)
    found = _one_through(box, View(tuple(axes), section.target.offset, section.source.offset))
    return found and Section(found.shape, dataclasses.replace(found.source, tensor=section.target.tensor),
                             dataclasses.replace(found.target, tensor=section.source.tensor))  # yapf: disable


def _one_through(section, view):
    """``section`` with its target in the view's order after; None when that is no box of elements."""
    axes = sorted(((stride, size, after) for size, stride, after in view.axes if size > 1), reverse=True)
    axes = axes or [(1, 1, 1)]
    parts = _split_at(section, [stride for stride, _, _ in axes])
    left = section.target.offset - view.before
    if parts is None or left < 0:
        return None
    offset, room = view.after, {}
    for stride, size, after in axes:
        digit, left = divmod(left, stride)
        offset, room[stride] = offset + digit * after, size - 1 - digit
    strides = []
    for size, target, _ in parts:
        stride, _, after = next((axis for axis in axes if axis[0] <= target), axes[-1])
        step = target // stride
        room[stride] -= step * (size - 1)
        if size > 1 and target % stride:
            return None
        strides.append(step * after)
    if left or min(room.values()) < 0:
        return None
    sizes, _, sources = zip(*parts)
    return Section(sizes, dataclasses.replace(section.target, offset=offset, strides=tuple(strides)),
                   dataclasses.replace(section.source, strides=sources))  # yapf: disable


def _split_at(section, boundaries):
    """The axes ``(size, target stride, source stride)``, cut in two where one passes a boundary; None if it cannot."""
    axes = list(zip(section.shape, section.target.strides, section.source.strides))
    for boundary in boundaries:
        for number, (size, target, source) in enumerate(axes):
            if size > 1 and target < boundary < size * target:
                inner = boundary // target
                if boundary % target or size % inner:
                    return None
                axes[number:number + 1] = [(size // inner, boundary, source * inner), (inner, target, source)]
                break
    return axes
