# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Loads a ZeRO-3 checkpoint into an engine of another number of ranks, expert-parallel degree or sub-group size.

A rank reads the elements that it holds from the files that hold them (``zero3_shards``) and hands DeepSpeed's own
loading what this rank would have saved: the content of its two files. So everything that is not a shard, as schedules,
counters and the caller's state, is loaded by DeepSpeed as ever.
"""
import contextlib
import copy
import functools

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import (FP32_FLAT_GROUPS, FP32_WEIGHT_KEY, FROZEN_PARAM_FRAGMENTS,
                                            MODEL_FILE_SUFFIX, OPTIMIZER_STATE_DICT, PARAM_GROUPS)
from deepspeed.checkpoint.differences import first_of
from deepspeed.checkpoint.zero3_shards import (PARAMETERS, RANKS, SavedShards, describe, is_elementwise,
                                               sub_group_numel)
from deepspeed.comm.agreement import agree
from deepspeed.module_inject.experts_only import ExpertParallelExperts
from deepspeed.moe.expert_groups import PER_GROUP
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.zero.expert_partitioning import holders_of
from deepspeed.utils import groups


def spread_layers(engine):
    """``{module_path, parameters, ranks}`` of every module of ``engine`` whose experts are spread; maybe none.

    The first call asks all ranks which experts they hold, so all must make it.
    """
    modules = {
        name: module
        for name, module in engine.module.named_modules() if isinstance(module, ExpertParallelExperts)
    }
    if modules and not hasattr(engine, "_expert_ranks"):
        name = next(iter(modules.values())).ep_group_name  # an engine has one degree
        mine = groups._get_expert_parallel_rank(name), groups._get_expert_data_parallel_rank(name)
        told = agree(engine.optimizer.dp_process_group, numbers=mine)
        engine._expert_ranks = tuple(map(tuple, holders_of(told)))
    return [{
        "module_path": name,
        PARAMETERS: [engine.param_names[param] for param in module.parameters(recurse=False) if _is_expert(param)],
        RANKS: engine._expert_ranks
    } for name, module in modules.items()]


def _is_expert(param):
    return getattr(param, "ds_zero_placement_family", None) == "autoep_expert"


class ReadAlready(CheckpointEngine):
    """Stands in for a checkpoint engine while an engine loads: both files of this rank are in memory.

    Args:
        model_states, optimizer_states: what loading the two files is to return.
        path: an existing file, for DeepSpeed to look at.
    """

    def __init__(self, model_states, optimizer_states, path):
        super().__init__()
        self.model_states, self.optimizer_states, self.path = model_states, optimizer_states, path

    def load(self, path, map_location=None):
        return self.model_states if path.endswith(MODEL_FILE_SUFFIX) else self.optimizer_states

    def create(self, info):
        raise NotImplementedError("found a save while a checkpoint is loaded; allowed: saving afterwards")

    save = commit = create


def read_for(engine, layers, folder, strict, weights_only):
    """``ReadAlready`` with what this rank of ``engine`` would have saved, read from the checkpoint in ``folder``.

    Nothing of the engine is changed, nothing is sent; one rank may fail where others do not.

    Args:
        layers: ``spread_layers`` of the engine.
        strict: whether parameters and buffers must be those of the model, all of them.
        weights_only: whether the optimizer's state stays as it is.

    Raises:
        ValueError: for a checkpoint that does not fit, or files that cannot be read.
    """
    saved = SavedShards(folder)
    saved.check_complete()
    target = _Target(engine, layers)
    _check_names(saved, target, strict)
    path = saved.model_path(min(target.rank, saved.world_size - 1))
    if saved.held == target.held and saved.world_size == target.world_size:
        load = functools.partial(engine.checkpoint_engine.load, map_location="cpu")
        return ReadAlready(saved.open(path, load), saved.open(saved.optimizer_path(target.rank), load), path)
    _check_topology(saved, engine)
    if not weights_only:
        _check_optimizer(saved, target)
    return ReadAlready(_model_states(saved, target),
                       {OPTIMIZER_STATE_DICT: _optimizer_states(saved, target, weights_only)}, path)


class _Target:
    """The engine that loads, described as a checkpoint is.

    Attributes:
        held: ``Held`` of every parameter, by name.
        rank, world_size: of the ranks that ZeRO-3 partitions over.
        params: the engine's parameters, by name.
        buffers: the engine's saved buffers, by name.
    """

    def __init__(self, engine, layers):
        self.optimizer = engine.optimizer
        self.rank = dist.get_rank(group=self.optimizer.dp_process_group)
        self.world_size = dist.get_world_size(group=self.optimizer.dp_process_group)
        shapes = engine._get_zero_frozen_param_attributes(engine._get_param_shape_func)
        self.held = describe(engine._get_zero_param_shapes(), shapes, layers, self.world_size)
        self.params = {name: param for param, name in engine.param_names.items()}
        buffers = dict(engine.module.named_buffers(remove_duplicate=False))
        self.buffers = {name: buffers[name] for name in engine._get_buffer_names()}

    def members(self):
        """``name -> Held`` of each sub-group's parameters, by number of the sub-group."""
        found = {}
        for name, held in self.held.items():
            if held.sub_group is not None:
                found.setdefault(held.sub_group, {})[name] = held
        return found


def _check_names(saved, target, strict):
    wanted = {name: held.shape for name, held in target.held.items()}
    wanted.update({name: tensor.shape for name, tensor in target.buffers.items()})
    trained = {name for name, held in target.held.items() if held.sub_group is not None}
    allowed = "the parameters and buffers of the engine's model"
    if strict:
        allowed += ", or load_module_strict=False for other frozen parameters and buffers"
    saved.check_model(wanted, allowed, needed=None if strict else trained)


def _check_topology(saved, engine):
    found = saved.model_states(0).get("mp_world_size", 1), engine.mp_world_size
    if found != (1, 1):
        raise ValueError(f"{saved.folder}: found {found[0]} model-parallel ranks in the checkpoint and {found[1]} in "
                         "the engine, with another number of ranks or placement of experts; allowed: 1 in both, or "
                         "the number of ranks and the placement that saved it")
    if engine.zero_nvme_offload_optimizer():
        raise ValueError(f"{saved.folder}: found zero_optimization.offload_optimizer.device=nvme, with another number "
                         "of ranks or placement of experts; allowed: cpu or none, or the number of ranks and the "
                         "placement that saved it")


def _check_optimizer(saved, target):
    frozen = [name for name in target.held if target.held[name].sub_group is not None
              and saved.held[name].sub_group is None]  # yapf: disable
    if frozen:
        raise ValueError(f"{saved.folder}: found no optimizer state of {first_of(frozen)}, frozen when it was saved; "
                         "allowed: freezing them, or load_optimizer_states=False")


def _model_states(saved, target):
    """What this rank would have written to its ``*_model_states.pt``."""
    # A rank that was there gets what it saved itself: buffers and the caller's state may differ between ranks.
    states = saved.model_states(target.rank if target.rank < saved.world_size else 0)
    fragments = {}
    for name, held in target.held.items():
        if held.sub_group is None:
            fragments[name] = target.params[name].ds_tensor
            if name in saved.held:
                fragments[name] = torch.zeros(held.shard_numel, dtype=fragments[name].dtype)
                _read_shard(saved, target, name, into=fragments[name])
    schedule = _schedule(states["lr_scheduler"], len(_groups(saved)),
                         [numbers[0] for numbers in _saved_groups(saved, target)])  # yapf: disable
    return {**states, "dp_world_size": target.world_size, "lr_scheduler": schedule,
            FROZEN_PARAM_FRAGMENTS: fragments}  # yapf: disable


def _schedule(state, count, origins):
    """The state of a schedule for ``count`` groups, for groups that were those with the numbers ``origins``."""
    if not isinstance(state, dict):
        return state
    moved = {name: [value[origin] for origin in origins] for name, value in state.items()
             if name in PER_GROUP and isinstance(value, list) and len(value) == count}  # yapf: disable
    if "_schedulers" in state:  # of torch's schedules that consist of others
        moved["_schedulers"] = [_schedule(part, count, origins) for part in state["_schedulers"]]
    return {**state, **moved}


def _read_shard(saved, target, name, into, key=FP32_WEIGHT_KEY):
    start, stop = target.held[name].placement.interval(target.rank)
    saved.read(name, start, key, into=into[:stop - start])


def _optimizer_states(saved, target, weights_only):
    """What this rank would have given to ZeRO-3 to save. ``weights_only`` leaves the optimizer's own state out."""
    numel = sub_group_numel(target.held)

    def flat(sub_group, members, key=FP32_WEIGHT_KEY):
        tensor = torch.zeros(numel[sub_group], dtype=target.optimizer.fp32_partitioned_groups_flat[sub_group].dtype)
        for name, held in members.items():
            _read_shard(saved, target, name, tensor[held.offset:], key)
        return tensor

    states = dict(saved.optimizer_states(0))
    states.pop("ds_zero_partition_groups", None)  # of the ranks that saved
    states[FP32_FLAT_GROUPS] = [flat(*of_one) for of_one in target.members().items()]
    if weights_only:
        del states[OPTIMIZER_STATE_DICT]
        return states
    state = {}
    for sub_group, members in target.members().items():
        state[sub_group] = _common_state(saved, members)
        keys = saved.elementwise_keys(saved.held[next(iter(members))].sub_group)
        state[sub_group].update({key: flat(sub_group, members, key) for key in keys})
    states[OPTIMIZER_STATE_DICT] = {"state": {n: s for n, s in state.items() if s},
                                    PARAM_GROUPS: _param_groups(saved, target)}  # yapf: disable
    return states


def _common_state(saved, members):
    """What the optimizer has once per flat tensor, as the number of steps: of all saved sub-groups of ``members``."""
    found = {}
    for name in members:
        sub_group = saved.held[name].sub_group
        if sub_group not in found:
            found[sub_group] = {key: value for key, value in saved.optimizer_state(0, sub_group).items()
                                if not is_elementwise(value, saved.numel[sub_group])}  # yapf: disable
    first, *others = found.values()
    for other in others:
        if {key: str(value) for key, value in other.items()} != {key: str(value) for key, value in first.items()}:
            raise ValueError(
                f"{saved.folder}: found optimizer state {first} and {other} for {first_of(list(members))}, "
                "which one sub-group holds now; allowed: the same for all of them, or "
                "load_optimizer_states=False")
    return copy.deepcopy(first)  # of its own: optimizers count steps in place


def _groups(saved):
    return saved.optimizer_states(0)[OPTIMIZER_STATE_DICT][PARAM_GROUPS]


def _saved_groups(saved, target):
    """For each of the engine's groups, the numbers of the saved groups that its parameters were in; at least one."""
    number_of = {sub_group: number for number, group in enumerate(_groups(saved)) for sub_group in group["params"]}
    found = [[] for _ in target.optimizer.optimizer.param_groups]
    for sub_group, members in target.members().items():
        were_in = [saved.held[name].sub_group for name in members]
        found[target.optimizer.sub_group_to_group_id[sub_group]] += [number_of[n] for n in were_in if n is not None]
    return [numbers or [min(number, len(_groups(saved)) - 1)] for number, numbers in enumerate(found)]


def _param_groups(saved, target):
    """The engine's groups of parameters with the hyperparameters of the saved groups that their parameters were in."""
    made, sub_groups = [], list(target.members())
    for number, (group, origins) in enumerate(zip(target.optimizer.optimizer.param_groups,
                                                  _saved_groups(saved, target))):  # yapf: disable
        sources = [_groups(saved)[origin] for origin in origins]
        values = [{key: source[key] for key in group if key in source and key not in ("params", "name", "moe")}
                  for source in sources]  # yapf: disable
        if any(other != values[0] for other in values):
            raise ValueError(f"{saved.folder}: found different hyperparameters for the parameters of the optimizer's "
                             f"group {number}; allowed: the same for all of them, or load_optimizer_states=False")
        mine = [sub_group for sub_group in sub_groups
                if target.optimizer.sub_group_to_group_id[sub_group] == number]  # yapf: disable
        made.append({**group, **values[0], "params": mine})
    return made


@contextlib.contextmanager
def loading_from(engine, read):
    """Let ``engine`` load what ``read`` holds inside the block."""
    checkpoint_engine, moe_layers = engine.checkpoint_engine, engine.has_moe_layers
    # Said to have MoE layers, ZeRO-3 loads weights without the optimizer's state from shards, not through whole ones.
    engine.checkpoint_engine, engine.has_moe_layers = read, True
    try:
        yield
    finally:
        engine.checkpoint_engine, engine.has_moe_layers = checkpoint_engine, moe_layers
