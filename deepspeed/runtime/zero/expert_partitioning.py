# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Expert parameters that are born partitioned over the ranks which hold the same experts.

Replacing a layer used to allocate its local experts whole and to partition them later (up to 0.19.6 after the last
layer). Here a ``zero.Init`` bound to the expert-data-parallel (EDP) group partitions each expert tensor as it is
constructed, and the weights are written straight into this rank's shard.
"""
import contextlib
from contextvars import ContextVar

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups

_ds_config = ContextVar("ds_config", default=None)
_expert_init = ContextVar("expert_init", default=None)


@contextlib.contextmanager
def replacing_layers_of(ds_config):
    """Say which DeepSpeed configuration (a dict) the layers replaced inside the block are partitioned by."""
    token = _ds_config.set(ds_config)
    try:
        yield
    finally:
        _ds_config.reset(token)


@contextlib.contextmanager
def experts_born_partitioned(source_params, ep_size):
    """Let ``construct_partitioned`` partition what it constructs inside the block, when the source is partitioned.

    A source held whole on every rank is left to the engine, which moves, broadcasts and converts the whole model.
    So is one with parameters on NVMe, whose shards cannot be written from here.

    Args:
        source_params: parameters of the experts that are being replaced; theirs is the dtype of the new ones.
        ep_size: expert-parallel degree, which names the EDP group.
    """
    partitioned = [param for param in source_params if is_zero_param(param)]
    if not partitioned or _ds_config.get() is None:
        yield
        return
    init = Init(data_parallel_group=groups._get_expert_data_parallel_group(f"ep_size_{ep_size}"),
                config_dict_or_path=_ds_config.get())
    if init.remote_device == OffloadDeviceEnum.nvme:
        yield
        return
    init.dtype = partitioned[0].dtype
    token = _expert_init.set(init)
    try:
        yield
    finally:
        _expert_init.reset(token)


def construct_partitioned(module_class, *args, **kwargs):
    """Construct ``module_class(*args, **kwargs)``, partitioned as ``experts_born_partitioned`` asks for."""
    init = _expert_init.get()
    if init is None:
        return module_class(*args, **kwargs)
    # Not `with init`: inside a caller's own zero.Init, suspended by deepspeed.initialize, entering would be a no-op.
    init.patch_init_and_builtins()
    try:
        return module_class(*args, **kwargs)
    finally:
        init.unpatch_init_and_builtins()


def write_shard(param, full):
    """Write this rank's part of ``full`` into the shard of the partitioned ``param``. No communication.

    Args:
        param: a released ZeRO-3 parameter.
        full: tensor with the shape and dtype that ``param`` has when gathered.

    Raises:
        ValueError: when shape or dtype differ.
    """
    if torch.Size(param.ds_shape) != full.shape or param.dtype != full.dtype:
        raise ValueError(f"expert parameter of shape {tuple(param.ds_shape)}, {param.dtype} cannot take weights of "
                         f"shape {tuple(full.shape)}, {full.dtype}")
    shard = param.ds_tensor
    start = dist.get_rank(group=param.ds_process_group) * shard.ds_numel
    count = min(shard.ds_numel, param.ds_numel - start)  # the last ranks' shards are padded, or all padding
    if count > 0:
        with torch.no_grad():
            shard[:count].copy_(full.reshape(-1)[start:start + count])
