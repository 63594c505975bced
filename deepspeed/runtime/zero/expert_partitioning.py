# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Expert parameters that are born partitioned over the ranks which hold the same experts, and filled shard to shard.

Replacing a layer used to gather it whole on every rank, copy the local experts out of it, allocate their parameters
whole and partition those later (up to 0.19.6 after the last layer). Here an expert parameter is never whole: a
``zero.Init`` bound to the expert-data-parallel (EDP) group allocates its shard, and every rank sends the elements of
its source shards to the ranks that hold them from now on.
"""
import contextlib
import dataclasses
from collections import Counter
from contextvars import ContextVar

import torch

import deepspeed.comm as dist
from deepspeed.comm.agreement import agree, failing_together
from deepspeed.moe.expert_layout import Layout
from deepspeed.moe.reshard import Plan, expert_placement, zero3_placement
from deepspeed.moe.reshard_exchange import exchange
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.unfilled import allocates_shards, partition_unfilled
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups

_settings = ContextVar("settings", default=None)
_new_experts = ContextVar("new_experts", default=None)


@contextlib.contextmanager
def _holding(variable, value):
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@dataclasses.dataclass
class _Settings:
    ds_config: dict
    bucket_bytes: int
    shared: set  # ids of parameters that more than one place of the model refers to
    inits: dict = dataclasses.field(default_factory=dict)  # EP degree -> the zero.Init of all layers


def replacing_layers_of(model, ds_config, bucket_bytes):
    """Say which DeepSpeed configuration (a dict) the layers of ``model`` replaced inside the block are partitioned by.

    Args:
        bucket_bytes: upper bound of the buffers, in bytes, through which weights move to other ranks.
    """
    return _holding(_settings, _Settings(ds_config, bucket_bytes, _shared_params(model)))


def _shared_params(model):
    modules = Counter(id(child) for module in model.modules() for child in module._modules.values())
    params = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    shared = [module for module in model.modules() if modules[id(module)] > 1]
    return ({number for number, count in params.items() if count > 1}
            | {id(param) for module in shared for param in module.parameters()})  # yapf: disable


@contextlib.contextmanager
def experts_born_partitioned(layout, sources, ep_size, ep_rank):
    """Let ``construct_partitioned`` build the new experts of one layer, when those that it replaces are partitioned.

    A source held whole on every rank is left to the engine, which moves, broadcasts and converts the whole model. So
    is one whose shards cannot be read as they are: on NVMe, quantized, or with a secondary partition (hpZ).

    Args:
        layout: function that returns the ``Layout`` from the sources to the new experts' parameters.
        sources: parameters of the experts that are being replaced, by the layout's names.
        ep_size, ep_rank: expert-parallel degree and rank.

    Yields:
        bool: whether ``construct_partitioned`` does so.

    Raises:
        FailedOnRank: on every rank, when the block fails on one of them.
    """
    partitioned = [param for param in sources.values() if is_zero_param(param)]
    settings = _settings.get()
    init = partitioned and settings and _edp_init(settings, partitioned, ep_size)
    if not init:
        yield False
        return
    group = partitioned[0].ds_process_group
    with failing_together(group):  # by itself: the block below begins with a collective of its own
        experts = _NewExperts(init, layout(), sources, group, ep_rank, settings.bucket_bytes)
    with failing_together(group), _holding(_new_experts, experts):
        yield True
    # Whoever still refers to a replaced parameter, it holds no weights any more; unless the model itself does.
    for param in [param for param in sources.values() if id(param) not in settings.shared]:
        param.ds_tensor.data = param.ds_tensor.new_empty(0)
        param.data = param.data.new_empty(0)  # a small parameter is gathered as well


def _edp_init(settings, sources, ep_size):
    """A ``zero.Init`` bound to the EDP group, or None when shards cannot be moved under this configuration."""
    offload = settings.ds_config.get("zero_optimization", {}).get("offload_param") or {}
    if offload.get("device") == OffloadDeviceEnum.nvme or any(param.nvme_swapper is not None for param in sources):
        return None  # before a zero.Init is made: its swapper clears the folder that holds the weights
    if ep_size not in settings.inits:
        group = groups._get_expert_data_parallel_group(f"ep_size_{ep_size}")
        settings.inits[ep_size] = Init(data_parallel_group=group, config_dict_or_path=settings.ds_config)
    init = settings.inits[ep_size]
    init.dtype = sources[0].dtype
    quantized = any(hasattr(param.ds_tensor, "ds_quant_scale") for param in sources)
    return init if allocates_shards(init) and not quantized else None


def are_born_partitioned():
    """Whether ``construct_partitioned`` builds and fills the experts of the layer that is being constructed."""
    return _new_experts.get() is not None


def construct_partitioned(module_class, *args, **kwargs):
    """Construct ``module_class(*args, **kwargs)``; partitioned and filled as ``experts_born_partitioned`` asks for."""
    experts = _new_experts.get()
    if experts is None:
        return module_class(*args, **kwargs)
    with torch.device("meta"):
        module = module_class(*args, **kwargs)
    experts.partition(module)
    experts.fill(module)
    return module


@dataclasses.dataclass
class _NewExperts:
    """The experts of one layer, from the shards of those that they replace."""
    init: Init
    layout: Layout
    sources: dict
    group: dist.ProcessGroup
    ep_rank: int
    bucket_bytes: int

    def partition(self, module):
        """Replace the parameters of ``module``, which have shapes only, by shards over the EDP group."""
        for name, shape in [(name, param.shape) for name, param in module.named_parameters(recurse=False)]:
            unfilled = torch.empty(1, dtype=self.init.dtype, device=self.init.local_device).expand(shape)
            setattr(module, name, torch.nn.Parameter(unfilled))
            partition_unfilled(self.init, getattr(module, name))

    def fill(self, module):
        """Write this rank's shards of ``module``, from all ranks' shards of the sources."""
        targets = {name: getattr(module, name) for name in self.layout.targets}
        told = agree(self.group, numbers=(self.ep_rank, dist.get_rank(group=self.init.ds_process_group)))
        holders = holders_of(told)
        for name, (experts, *matrix) in self.layout.targets.items():
            expected = torch.Size((experts // len(holders), *matrix))
            if targets[name].ds_shape != expected:
                raise ValueError(f"expert parameter {name}: found shape {tuple(targets[name].ds_shape)}; the weights "
                                 f"that it takes have shape {tuple(expected)}")
        plan = Plan(self.layout,
                    {name: zero3_placement(param.ds_numel, len(told)) for name, param in self.sources.items()},
                    {name: expert_placement(param.ds_numel * len(holders), holders)
                     for name, param in targets.items()})  # yapf: disable
        exchange(plan, _shards(self.sources), _shards(targets), self.group, self.bucket_bytes)


def holders_of(coordinates):
    """``[ep_rank][edp_rank] -> rank``, from every rank's ``(ep_rank, edp_rank)``."""
    ranks = {coordinate: rank for rank, coordinate in enumerate(coordinates)}
    degrees = [max(column) + 1 for column in zip(*coordinates)]
    if len(ranks) != len(coordinates) or len(ranks) != degrees[0] * degrees[1]:
        raise ValueError(f"expert_parallel: found the ranks of ZeRO-3 at (EP rank, EDP rank) {coordinates}; allowed: "
                         "a full grid, each place once")
    return [[ranks[ep_rank, edp_rank] for edp_rank in range(degrees[1])] for ep_rank in range(degrees[0])]


def _shards(params):
    return {name: param.ds_tensor for name, param in params.items()}
