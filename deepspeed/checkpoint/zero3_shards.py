# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A saved ZeRO-3 checkpoint as one more placement: which file holds which flat interval of which whole tensor.

Every rank of the job that saved wrote two files: ``*_model_states.pt`` with shapes, buffers and its shards of frozen
parameters, ``*_optim_states.pt`` with one flat tensor per sub-group of trained parameters and the optimizer's tensors
of the same length. In a flat tensor each parameter of the sub-group has ``ceil(numel / group size)`` elements, in the
order of ``param_shapes``::

    rank 1 of 4, EP=2      sub-group 0 (all ranks)                 sub-group 1 (EDP group {1, 3})
    fp32, exp_avg, ...     embedding 2/4 | router 2/4 | norm 2/4   E3 E4 E5 of gate_up_proj, 1/2 | of down_proj, 1/2

Files are mapped into memory, so that a reader touches only the elements that it copies.
"""
import dataclasses
import functools
import os
import zipfile
from math import prod
from typing import Optional, Tuple

import torch

from deepspeed.checkpoint.constants import (AUTOEP_LAYERS_KEY, BUFFER_NAMES, FP32_FLAT_GROUPS, FP32_WEIGHT_KEY,
                                            FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, OPTIMIZER_STATE_DICT,
                                            PARAM_SHAPES)
from deepspeed.checkpoint.differences import told
from deepspeed.moe.reshard import expert_placement, zero3_placement

# Of an entry in AUTOEP_LAYERS_KEY: the expert parameters of a module, and [ep_rank][edp_rank] -> rank that holds them.
PARAMETERS, RANKS = "parameters", "ranks"


@dataclasses.dataclass(frozen=True)
class Held:
    """Where the elements of one whole tensor are.

    Attributes:
        shape: of the whole tensor, experts of all ranks included.
        ranks: ``[ep_rank][edp_rank] -> rank``; one row with all ranks for a tensor that is not split by expert.
        sub_group: number of the flat tensor that the shards lie in; None for a frozen parameter, a tensor by itself.
        offset: first element of the shard in the flat tensor, on every rank.
    """
    shape: Tuple[int, ...]
    ranks: Tuple[Tuple[int, ...], ...]
    sub_group: Optional[int]
    offset: int

    @property
    def placement(self):
        if len(self.ranks) == 1:
            return zero3_placement(prod(self.shape), len(self.ranks[0]))
        return expert_placement(prod(self.shape), self.ranks)

    @property
    def shard_numel(self):
        """Elements of a shard, padding included."""
        return -(-prod(self.shape) // len(self.ranks) // len(self.ranks[0]))


def describe(param_shapes, frozen_shapes, layers, world_size):
    """``Held`` of every parameter by name, from what ZeRO-3 saves of an engine, or would save.

    Args:
        param_shapes: per sub-group, name -> shape on a rank before ZeRO-3 partitions it.
        frozen_shapes: the same of frozen parameters; None when they were not saved.
        layers: entries of modules whose experts are spread over ranks.
        world_size: number of ranks that ZeRO-3 partitions over.
    """
    everywhere = (tuple(range(world_size)), )
    experts = {name: entry[RANKS] for entry in layers for name in entry[PARAMETERS]}

    def held(name, shape, sub_group, offset):
        ranks = experts.get(name, everywhere)
        whole = (shape[0] * len(ranks), *shape[1:]) if name in experts else shape
        return Held(tuple(whole), ranks, sub_group, offset)

    found = {}
    for sub_group, shapes in enumerate(param_shapes):
        offset = 0
        for name, shape in shapes.items():
            found[name] = held(name, shape, sub_group, offset)
            offset += found[name].shard_numel
    for name, shape in (frozen_shapes or {}).items():
        found[name] = held(name, shape, None, 0)
    return found


def sub_group_numel(held):
    """Elements of each sub-group's flat tensor, from a description."""
    numel = {}
    for where in held.values():
        if where.sub_group is not None:
            numel[where.sub_group] = numel.get(where.sub_group, 0) + where.shard_numel
    return numel


def is_elementwise(tensor, numel):
    """Whether a tensor of an optimizer's state has an element for every one of ``numel`` weights."""
    return torch.is_tensor(tensor) and tensor.shape == (numel, )


def expert_layers(model_states):
    """Our entries of modules whose experts are spread, from the content of a ``*_model_states.pt``; maybe none."""
    layers = model_states.get(AUTOEP_LAYERS_KEY)
    return [entry for entry in layers if RANKS in entry] if isinstance(layers, list) else []


def is_spread(folder):
    """Whether ``folder`` holds a checkpoint of a job that spread experts; False also for what cannot be read."""
    try:
        return bool(expert_layers(_load(os.path.join(folder, _model_file(0)))))
    except Exception:  # DeepSpeed's own loading says what is wrong with a checkpoint of its own
        return False


def _model_file(rank):
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def _optim_files(rank):
    """Names that a rank's optimizer file may have: DeepSpeed puts the dtype of the weights in front."""
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return [name, f"bf16_{name}"]


def _load(path):
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False)


class SavedShards:
    """The checkpoint in ``folder``. Reading raises ValueError for a file that is missing, cut off or of another job.

    Attributes:
        held: ``Held`` of every saved parameter, by name.
        world_size: number of ranks that saved.
        numel: elements of each sub-group's flat tensor on a rank, padding included.
        model_states, optimizer_states: functions of a rank, what it wrote to either of its files.
    """

    def __init__(self, folder):
        self.folder = folder
        self.model_states = functools.lru_cache(maxsize=None)(self._model_states)
        self.optimizer_states = functools.lru_cache(maxsize=None)(self._optimizer_states)
        states = self.model_states(0)
        if states.get(PARAM_SHAPES) is None:
            raise ValueError(
                f"{folder}: found a checkpoint without an optimizer's shards; allowed: one that was saved "
                "under ZeRO-3 while training")
        self.world_size = states["dp_world_size"]
        self.held = describe(states[PARAM_SHAPES], states.get(FROZEN_PARAM_SHAPES), expert_layers(states),
                             self.world_size)
        self.numel = sub_group_numel(self.held)

    def _model_states(self, rank):
        return self.open(self.model_path(rank))

    def _optimizer_states(self, rank):
        states = self.open(self.optimizer_path(rank))[OPTIMIZER_STATE_DICT]
        found = [flat.numel() for flat in states[FP32_FLAT_GROUPS]]
        expected = list(self.numel.values())
        if found != expected:
            raise ValueError(f"{self.folder}: found sub-groups of {found} elements in the file of rank {rank}; the "
                             f"shapes saved with them make {expected} over {self.world_size} ranks")
        return states

    def model_path(self, rank):
        return self._path([_model_file(rank)])

    def optimizer_path(self, rank):
        return self._path(_optim_files(rank))

    @functools.cached_property
    def buffers(self):
        """Name -> buffer, as rank 0 saved them."""
        states = self.model_states(0)
        return {name: states["module"][name] for name in states[BUFFER_NAMES] if name in states["module"]}

    def check_model(self, wanted, allowed, needed=None):
        """Raise ValueError unless the checkpoint's parameters and buffers are those of a model.

        Args:
            wanted: name -> shape of the model's.
            allowed: end of the message, what fits.
            needed: names that must have been saved, where others may be missing or left over; None for all of them
                and no other.
        """
        found = {name: tuple(held.shape) for name, held in self.held.items()}
        found.update({name: tuple(tensor.shape) for name, tensor in self.buffers.items()})
        wanted = {name: tuple(shape) for name, shape in wanted.items()}
        lists = {
            "missing": [name for name in wanted if name not in found and (needed is None or name in needed)],
            "unexpected": [name for name in found if name not in wanted and needed is None],
            "of another shape": [f"{name} {found[name]} for {wanted[name]}"
                                 for name in wanted if found.get(name) not in (None, wanted[name])],
        }  # yapf: disable
        if any(lists.values()):
            raise ValueError(
                f"{self.folder}: found the checkpoint of another model; {told(lists)}; allowed: {allowed}")

    def check_complete(self):
        """Raise ValueError when a file of one of the ranks is missing."""
        for rank in range(self.world_size):
            self.model_path(rank)
            self.optimizer_path(rank)

    def check_joinable(self):
        """Raise ValueError for spread experts of whole blocks, which DeepSpeed keeps in files of their own."""
        entries = self.model_states(0).get(AUTOEP_LAYERS_KEY) or []
        if len(expert_layers(self.model_states(0))) != len(entries):
            raise ValueError(f"{self.folder}: found experts that are spread as whole blocks "
                             "(expert_parallel.preset_model); allowed: expert parallelism of the experts only, or "
                             "none. Load it into an engine and call save_hf_checkpoint")

    def optimizer_state(self, rank, sub_group):
        """``key -> value`` of the optimizer's state for one flat tensor, as ``rank`` wrote it."""
        return self.optimizer_states(rank)[OPTIMIZER_STATE_DICT]["state"].get(sub_group, {})

    def elementwise_keys(self, sub_group):
        """Names of the state tensors of a sub-group that have an element per weight."""
        state = self.optimizer_state(0, sub_group)
        return [key for key, value in state.items() if is_elementwise(value, self.numel[sub_group])]

    def read(self, name, start, key=FP32_WEIGHT_KEY, *, into):
        """Copy ``len(into)`` elements of the whole tensor ``name``, from ``start`` on, into a flat tensor.

        Args:
            key: ``"fp32"`` for weights (a frozen parameter's in its own dtype), or a name of ``elementwise_keys``.
        """
        placement, stop = self.held[name].placement, start + len(into)
        for rank in placement.owners_between(start, stop):
            low, high = placement.interval(rank)
            first, last = max(start, low), min(stop, high)
            into[first - start:last - start].copy_(self._shard(rank, name, key)[first - low:last - low])

    def dtype(self, name):
        return self._shard(0, name, FP32_WEIGHT_KEY).dtype

    @torch.no_grad()
    def _shard(self, rank, name, key):
        held = self.held[name]
        if held.sub_group is None:
            return self.model_states(rank)[FROZEN_PARAM_FRAGMENTS][name].flatten()
        if key == FP32_WEIGHT_KEY:
            flat = self.optimizer_states(rank)[FP32_FLAT_GROUPS][held.sub_group]
        else:
            flat = self.optimizer_state(rank, held.sub_group)[key]
        return flat.detach()[held.offset:held.offset + held.shard_numel]

    def _path(self, names):
        paths = [os.path.join(self.folder, name) for name in names]
        found = next((path for path in paths if os.path.isfile(path)), None)
        if found is None:
            raise ValueError(f"{self.folder}: found no {names[0]}; allowed: the folder of a checkpoint that was saved "
                             "under ZeRO-3, with the files of all its ranks")
        return found

    def open(self, path, load=_load):
        """``load(path)``, with an error that names the file."""
        try:
            return load(path)
        except Exception as error:
            raise ValueError(f"{path}: found a file that cannot be read ({type(error).__name__}: {error}); allowed: "
                             "what torch.save wrote, whole") from error
