# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The tensors of an engine's model as Hugging Face knows them, and who holds which elements of each."""
import dataclasses
from math import prod
from typing import NamedTuple, Optional

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.tensor_origins import View, through
from deepspeed.comm.agreement import agree
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.experts_only import ExpertParallelExperts, local_state
from deepspeed.moe.expert_layout import Layout, Section, Side, row_major
from deepspeed.moe.reshard import (Placement, Plan, boxes_of, expert_placement, replicated_expert_placement,
                                   sole_placement, zero3_placement)
from deepspeed.moe.reshard_exchange import exchange
from deepspeed.runtime.zero.expert_partitioning import holders_of
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups


class Held(NamedTuple):
    """A tensor of the engine: this rank's part of it, flat, and who holds which interval of the whole.

    ``placement`` is None when every rank holds it whole.
    """
    shard: torch.Tensor
    placement: Optional[Placement]


class Wanted(NamedTuple):
    """A tensor to bring together on one rank, and the sections whose targets it is."""
    owner: int
    shape: tuple
    dtype: torch.dtype
    sections: tuple


@dataclasses.dataclass
class ModelTensors:
    """What ``state_dict`` of the unmodified model would hold.

    Attributes:
        tensors: name in the unmodified model's state dict -> tensor on the meta device; tied names share one.
        sections: the same names -> sections from the engine's tensors, ``held``.
        held: name of a tensor of the engine -> ``Held``.
        buffers: names of tensors that are no parameters.
        frozen: names of parameters that are not trained.
    """
    tensors: dict = dataclasses.field(default_factory=dict)
    sections: dict = dataclasses.field(default_factory=dict)
    held: dict = dataclasses.field(default_factory=dict)
    buffers: set = dataclasses.field(default_factory=set)
    frozen: set = dataclasses.field(default_factory=set)

    def whole(self, name, owner, target=None):
        """``Wanted``: the tensor ``name`` whole, to be called ``target``."""
        sections = tuple(
            dataclasses.replace(section, target=dataclasses.replace(section.target, tensor=target or name))
            for section in self.sections[name])
        return Wanted(owner, self.tensors[name].shape, self.tensors[name].dtype, sections)

    def made_of(self, target, shape, dtype, sections, owner):
        """``Wanted``: a tensor to be called ``target``, made of boxes of the tensors; None if those are no boxes here.

        Args:
            sections: to the wanted tensor, flat, from tensors of the state dict.
        """
        found = []
        for section in sections:
            axes = zip(section.shape, section.source.strides, section.target.strides)
            view = View(tuple(axes), section.source.offset, section.target.offset)
            moved = through(self._around(section), view)
            if moved is None:
                return None
            found += [dataclasses.replace(part, target=dataclasses.replace(part.target, tensor=target))
                      for part in moved]  # yapf: disable
        return Wanted(owner, shape, dtype, tuple(found))

    def _around(self, section):
        """The sections of the tensor that ``section`` takes from, cut to what it takes if that is one interval."""
        sections, side = self.sections[section.source.tensor], section.source
        if len(sections) == 1 or side.strides != row_major(section.shape):
            return sections
        return [part for one in sections for part in _within(one, side.offset, prod(section.shape))]

    def gather(self, wanted, group, bucket_bytes):
        """Bring tensors together on their owners, which hold them on the CPU; every rank must call.

        Args:
            wanted: name -> ``Wanted``, the same on every rank.
            group: process group of all ranks.
            bucket_bytes: upper bound of the buffers on this rank.

        Returns:
            dict: those that this rank owns, by name.
        """
        rank, ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
        mine = {name: torch.empty(w.shape, dtype=w.dtype) for name, w in wanted.items() if w.owner == rank}
        for dtype in dict.fromkeys(w.dtype for w in wanted.values()):
            part = {name: w for name, w in wanted.items() if w.dtype == dtype}
            owners = {section.source.tensor: w.owner for w in part.values() for section in w.sections}
            sources = {
                name: self.held[name].placement or sole_placement(self.held[name].shard.numel(), owner, ranks)
                for name, owner in owners.items()
            }
            targets = {name: sole_placement(prod(w.shape), w.owner, ranks) for name, w in part.items()}
            sections = tuple(section for w in part.values() for section in w.sections)
            shards = {name: self.held[name].shard for name in sources}
            filled = {name: mine[name].view(-1) for name in part if name in mine}
            exchange(Plan(Layout(sections, {}, {}), sources, targets), shards, filled, group, bucket_bytes)
        return mine


def _section(shape, target, source):
    if not shape:
        return Section((1, ), dataclasses.replace(target, strides=(1, )), dataclasses.replace(source, strides=(1, )))
    return Section(tuple(shape), target, source).collapsed()


def _within(section, start, numel):
    """The parts of ``section`` in elements ``[start, start + numel)`` of its target."""
    target, source = section.target, section.source
    return [
        Section(box.shape, dataclasses.replace(target, offset=target.at(box.start)),
                dataclasses.replace(source, offset=source.at(box.start)))
        for box in boxes_of(section.shape, target.strides, start - target.offset, start + numel - target.offset)
    ]


def model_tensors(model, group):
    """``ModelTensors`` of an engine's ``model``, whose ranks form ``group``; every rank must call.

    Raises:
        NotImplementedError: on every rank alike, for parameters offloaded to NVMe.
    """
    found = ModelTensors()
    holders = _Holders(group)
    blocks = {f"{name}.": block for name, block in model.named_modules() if _is_replaced_block(block)}
    with local_state():
        state = model.state_dict(keep_vars=True)
    known = {}  # id of a tensor, or the prefix of a replaced block -> its first name
    for name, tensor in state.items():
        prefix = next((prefix for prefix in blocks if name.startswith(prefix)), None)
        if prefix in known or not isinstance(tensor, torch.Tensor):
            continue
        if prefix is not None:
            known[prefix] = prefix
            _add_block(found, prefix, blocks[prefix], holders)
            continue
        first = known.setdefault(id(tensor), name)
        if first == name:
            _add(found, name, name, tensor, holders)
        found.tensors[name], found.sections[name] = found.tensors[first], found.sections[first]
        _note_kind(found, name, tensor)
    return found


def _is_replaced_block(module):
    return isinstance(module, AutoEPMoELayer) and not isinstance(module, ExpertParallelExperts)


def _note_kind(found, name, tensor):
    if not isinstance(tensor, torch.nn.Parameter):
        found.buffers.add(name)
    elif not tensor.requires_grad:
        found.frozen.add(name)


def _add(found, name, held_as, tensor, holders):
    """A tensor of the unmodified model, ``name``, that the engine holds under another name at most."""
    held, shape = _held(held_as, tensor, holders)
    found.held[held_as] = held
    found.tensors[name] = torch.empty(shape, dtype=held.shard.dtype, device="meta")
    found.sections[name] = (_section((prod(shape), ), Side(name, 0, (1, )), Side(held_as, 0, (1, ))), )


def _add_block(found, prefix, block, holders):
    """The tensors of the unmodified MoE block in whose place ``block`` stands; all names begin with ``prefix``."""
    own = dict(block.named_parameters())
    own.update(block.named_buffers())
    for held_as, name in block.unmodified.names.items():
        _add(found, f"{prefix}{name}", f"{prefix}{held_as}", own[held_as], holders)
        _note_kind(found, f"{prefix}{name}", own[held_as])
    layout = block.unmodified.layout
    experts = {target: f"{prefix}experts.{target}" for target in layout.targets}
    for target, held_as in experts.items():
        found.held[held_as], _ = _held(held_as, own[f"experts.{target}"], holders)
    for section in layout.sections:
        name, held_as = f"{prefix}{section.source.tensor}", experts[section.target.tensor]
        found.tensors[name] = torch.empty(layout.sources[section.source.tensor],
                                          dtype=found.held[held_as].shard.dtype, device="meta")  # yapf: disable
        swapped = Section(section.shape, dataclasses.replace(section.source, tensor=name),
                          dataclasses.replace(section.target, tensor=held_as))
        found.sections[name] = (*found.sections.get(name, ()), swapped)
        _note_kind(found, name, own[f"experts.{section.target.tensor}"])
    for name in filter(found.tensors.__contains__, [f"{prefix}{name}" for name in block.unmodified.order]):
        found.tensors[name] = found.tensors.pop(name)


def _held(name, tensor, holders):
    """``Held`` and the whole shape of one of the engine's tensors."""
    expert_group = getattr(tensor, "ds_zero_partition_group_name", None)
    degree = groups._get_expert_parallel_world_size(expert_group) if expert_group else 1
    shape = torch.Size(getattr(tensor, "ds_shape", tensor.shape))
    if expert_group:
        shape = torch.Size((shape[0] * degree, *shape[1:]))
    numel = shape.numel()
    if not is_zero_param(tensor):
        placement = replicated_expert_placement(numel, holders.of(expert_group)) if degree > 1 else None
        return Held(tensor.detach().contiguous().view(-1), placement), shape
    if tensor.nvme_swapper is not None:
        raise NotImplementedError(f"plain Hugging Face checkpoint: found parameter {name} offloaded to NVMe "
                                  "(zero_optimization.offload_param.device); allowed: none or cpu")
    if expert_group:
        return Held(tensor.ds_tensor.view(-1), expert_placement(numel, holders.of(expert_group))), shape
    return Held(tensor.ds_tensor.view(-1), zero3_placement(numel, dist.get_world_size(group=holders.group))), shape


class _Holders:
    """Which ranks hold the experts of which EP rank, for every EP degree of a model."""

    def __init__(self, group):
        self.group = group
        self._known = {}

    def of(self, name):
        """``[ep_rank][edp_rank] -> rank`` of the expert group called ``name``; every rank must ask."""
        if name not in self._known:
            edp_group = groups._get_expert_data_parallel_group(name)
            mine = (groups._get_expert_parallel_rank(name), dist.get_rank(group=edp_group))
            self._known[name] = holders_of(agree(self.group, numbers=mine))
        return self._known[name]
