# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where each element of an expert tensor is found in the Hugging Face tensors: the one description.

A layout is a list of sections. A section is a box of elements that lies in one target tensor and in one source tensor,
each time with strides of its own. So fused, transposed, interleaved, biased and ungated tensors and lists of expert
modules differ in offsets and strides only, and whatever moves weights needs to know none of these cases.

Example: E experts whose source is a fused ``gate_up_proj [E, 2F, H]``, targets ``w1 [E, F, H]`` and ``w3 [E, F, H]``.
The gate halves and the up halves are one section each; its target is contiguous, its source skips every other block::

    section  target  shape       target strides   source        offset  source strides
    gate     w1      (E, F, H)   (F*H, H, 1)      gate_up_proj  0       (2*F*H, H, 1)
    up       w3      (E, F, H)   (F*H, H, 1)      gate_up_proj  F*H     (2*F*H, H, 1)

All offsets and strides count elements of the whole (unpartitioned) tensors.
"""
import dataclasses
from math import prod
from typing import NamedTuple, Tuple


@dataclasses.dataclass(frozen=True)
class Side:
    """One tensor as a section sees it: element ``index`` of the box is at ``offset + sum(index * strides)``."""
    tensor: str
    offset: int
    strides: Tuple[int, ...]

    def at(self, index):
        """Where in the flat tensor the element ``index`` of the box lies."""
        return self.offset + sum(i * stride for i, stride in zip(index, self.strides))


@dataclasses.dataclass(frozen=True)
class Section:
    """A box of ``shape`` elements: where they lie in a target tensor and where they are found in a source tensor."""
    shape: Tuple[int, ...]
    target: Side
    source: Side

    def collapsed(self):
        """The same section with neighbouring axes joined where both tensors hold them without a gap."""
        axes = []
        for axis in zip(self.shape, self.target.strides, self.source.strides):
            size, target, source = axis
            if size == 1 and axes:
                continue
            if axes and axes[-1][1] == size * target and axes[-1][2] == size * source:
                axis = (axes.pop()[0] * size, target, source)
            axes.append(axis)
        shape, target, source = zip(*axes)
        return Section(shape, dataclasses.replace(self.target, strides=target),
                       dataclasses.replace(self.source, strides=source))


class Layout(NamedTuple):
    """Sections, and the shape of every tensor that they name."""
    sections: Tuple[Section, ...]
    targets: dict
    sources: dict


def row_major(shape):
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    return tuple(prod(shape[axis + 1:]) for axis in range(len(shape)))


def _make(sections, targets, sources):
    return Layout(tuple(section.collapsed() for section in sections), targets, sources)


def identity_layout(shapes):
    """Targets that are the sources themselves: names, shapes and order stay Hugging Face's.

    Args:
        shapes: tensor name -> shape.
    """
    return _copies(shapes, {name: name for name in shapes})


def _copies(shapes, names):
    """The layout of targets that are whole sources: ``names`` maps each target to its source."""
    targets = {target: tuple(shapes[name]) for target, name in names.items()}
    sections = [
        Section((prod(targets[target]), ), Side(target, 0, (1, )), Side(name, 0, (1, )))
        for target, name in names.items()
    ]
    return _make(sections, targets, dict(shapes))


def _slice_of(source, shape, axis, start, step, size, transposed, target, targets):
    """A section that takes ``size`` indices of one ``axis`` of ``source``, from ``start`` on in steps of ``step``."""
    strides = list(row_major(shape))
    offset = start * strides[axis]
    strides[axis] *= step
    box = list(shape)
    box[axis] = size
    if transposed:
        box[-1], box[-2], strides[-1], strides[-2] = box[-2], box[-1], strides[-2], strides[-1]
    targets[target] = tuple(box)
    return Section(tuple(box), Side(target, 0, row_major(box)), Side(source, offset, tuple(strides)))


def grouped_layout(shapes, *, gate_up="gate_up_proj", up="up_proj", down="down_proj", is_transposed=False,
                   is_concatenated=True, has_gate=True, has_bias=False):  # yapf: disable
    """From the tensors of Transformers' experts interface to grouped ``w1``, ``w2``, ``w3``, all ``[E, out, in]``.

    Args:
        shapes: shapes by name: ``gate_up`` ``[E, 2F, H]`` (with ``has_gate``, else ``up`` ``[E, F, H]``) and ``down``
            ``[E, H, F]``, each with its last two axes swapped when ``is_transposed``. With ``has_bias`` also
            ``<name>_bias`` ``[E, 2F]``, ``[E, F]`` and ``[E, H]``.
        is_concatenated: gate rows before up rows; otherwise they alternate, gate first.

    Returns:
        Layout with targets ``w1`` (gate, or the only input projection), ``w2`` (down), ``w3`` (up, when gated), and
        ``<name>_bias`` of each.

    Raises:
        ValueError: when the shapes do not fit each other.
    """
    source = gate_up if has_gate else up
    _check_grouped(shapes, source, down, is_transposed, has_gate)
    targets, sections = {}, []
    for suffix in ("", "_bias") if has_bias else ("", ):
        shape = tuple(shapes[source + suffix])
        transposed = is_transposed and not suffix
        axis = 2 if transposed else 1
        parts = ("w1", "w3") if has_gate else ("w1", )
        size = shape[axis] // len(parts)
        for part, name in enumerate(parts):
            start, step = (part * size, 1) if is_concatenated else (part, len(parts))
            sections.append(_slice_of(source + suffix, shape, axis, start, step, size, transposed, name + suffix,
                                      targets))  # yapf: disable
        shape = tuple(shapes[down + suffix])
        sections.append(_slice_of(down + suffix, shape, 1, 0, 1, shape[1], transposed, "w2" + suffix, targets))
    return _make(sections, targets, dict(shapes))


def _check_grouped(shapes, source, down, is_transposed, has_gate):
    experts, *matrix = shapes[source]
    outputs, hidden = reversed(matrix) if is_transposed else matrix
    parts = 2 if has_gate else 1
    wanted = (experts, outputs // parts, hidden) if is_transposed else (experts, hidden, outputs // parts)
    if outputs % parts or tuple(shapes[down]) != wanted:
        raise ValueError(
            f"expert weights {source} {tuple(shapes[source])} and {down} {tuple(shapes[down])} do not fit "
            f"each other; expected {down} of shape {wanted} and an even number of gate and up rows")


def separate_layout(shapes, gate, down, up):
    """From three tensors ``gate [E, F, H]``, ``down [E, H, F]``, ``up [E, F, H]`` to ``w1``, ``w2``, ``w3``."""
    return _copies(shapes, {"w1": gate, "w2": down, "w3": up})


def module_list_layout(shapes, experts, *, gate, down, up=None):
    """From one matrix for each expert, as ``experts.3.gate_proj.weight``, to grouped ``w1``, ``w2``, ``w3``.

    Args:
        shapes: shapes by name, for each expert ``"<index>.<gate>"`` ``[F, H]``, ``"<index>.<down>"`` ``[H, F]`` and
            ``"<index>.<up>"`` ``[F, H]``. Without ``up``, ``gate`` holds both: ``[2F, H]``, gate rows first.
        experts: number of experts, E.

    Raises:
        ValueError: when an expert's matrix has another shape than the first expert's.
    """
    targets, sections = {}, []
    columns = {"w1": gate, "w2": down, "w3": up or gate}
    for target, name in columns.items():
        shape = tuple(shapes[f"0.{name}"])
        rows = shape[0] // 2 if up is None and name == gate else shape[0]
        targets[target] = (experts, rows, *shape[1:])
        size = prod(targets[target][1:])
        start = size if up is None and target == "w3" else 0
        for expert in range(experts):
            source = f"{expert}.{name}"
            if tuple(shapes[source]) != shape:
                raise ValueError(f"expert weights {source}: found shape {tuple(shapes[source])}; expected {shape}, "
                                 "the shape of expert 0")
            sections.append(Section((size, ), Side(target, expert * size, (1, )), Side(source, start, (1, ))))
    return _make(sections, targets, dict(shapes))
