# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes held while an MoE model is built under ``zero.Init`` and while its layers are replaced."""
import contextlib
import gc
import sys
import time
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines import autoep_layers, ds_config

# Experts dwarf everything else: 8 experts of 3 x 64 x 64 float32 are 384 KiB a layer.
SIZES = dict(num_experts=8, hidden_size=64, moe_intermediate_size=64, vocab_size=8, num_attention_heads=1, head_dim=8,
             intermediate_size=8)  # yapf: disable
LAYER_BYTES = 8 * 3 * 64 * 64 * 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages made inside the block that are still alive, and their largest sum.

    A storage counts from the operator that made it until nothing holds it, whichever thread lets go of it last; the
    profiler's memory events miss what gloo's threads free.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def leave_out(self, tensors):
        """Do not count memory that is mapped from a file."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def reset(self):
        """Let the peak start anew from what is alive."""
        self.peak = self.live

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


class DeviceBytes:
    """The same figures from the accelerator's allocator, for tensors on a GPU."""

    def __enter__(self):
        self.reset()
        return self

    def __exit__(self, *exc):
        return None

    def reset(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    @property
    def live(self):
        return torch.cuda.memory_allocated()

    @property
    def peak(self):
        return torch.cuda.max_memory_allocated()


class _Replaced(Exception):
    """Ends initialization after the layers were replaced: what follows is not measured."""


def is_unpartitioned(param):
    return param.numel() > 0 or not hasattr(param, "ds_id")


def measure(layers, ep, sizes=SIZES, dtype=None, device="cpu", whole_initialization=True, bucket_bytes=None,
            preset="qwen3_moe"):  # yapf: disable
    """Build a model of ``layers`` layers under ``zero.Init``, initialize an engine and return what was seen.

    Args:
        ep: expert-parallel degree.
        sizes: keys of a Qwen3-MoE configuration; ``dtype``: ``"bf16"``, or float32 when None.
        whole_initialization: whether to go on after the layers were replaced.
        bucket_bytes: ``expert_parallel.reshard_bucket_bytes``.
        preset: replace whole blocks by this preset, or the experts only when None.

    Returns:
        A dict. Bytes above those that are left when the phase is over: ``construct`` (building the model) and
        ``replace``. ``end``: bytes that replacement added. ``seconds`` of replacement; ``received`` and ``sent``, the
        bytes that its exchanges moved. ``unpartitioned``: elements of finished layers' experts that were whole while
        the next was built, at most. ``alive_after_replacement`` and ``alive_after_init`` (with
        ``whole_initialization``): the part of the source experts' bytes that was not freed.
    """
    block = {} if bucket_bytes is None else {"reshard_bucket_bytes": bucket_bytes}
    config = ds_config(ep, dtype=dtype, block=block, preset=preset)
    with (LiveBytes() if device == "cpu" else DeviceBytes()) as counted:
        return _build_and_initialize(layers, config, sizes, whole_initialization, counted)


def _build_and_initialize(layers, config, sizes, whole_initialization, counted):
    import deepspeed
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # imported before zero.Init patches torch

    seen = {"unpartitioned": 0, "sent": 0, "received": 0}
    counted.reset()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **sizes))
    gc.collect()
    seen["construct"] = counted.peak - counted.live
    sources = [(weakref.ref(param), param.ds_tensor.nbytes) for name, param in model.named_parameters()
               if ".experts." in name]  # yapf: disable
    replace, construct = DeepSpeedEngine._configure_expert_parallel, AutoEPMoELayer.__init__

    def alive():
        return sum(size for param, size in sources if param() is not None) / sum(size for _, size in sources)

    def watched_replacement(engine, model, *args, **kwargs):
        counted.reset()
        before, began = counted.live, time.perf_counter()
        replaced = replace(engine, model, *args, **kwargs)
        seen["seconds"] = time.perf_counter() - began
        seen["replace"], seen["end"] = counted.peak - before, counted.live - before
        seen["alive_after_replacement"] = alive()
        if not whole_initialization:
            raise _Replaced
        return replaced

    def watched_construction(layer, *args, **kwargs):
        whole = [param for done in autoep_layers(model).values() for param in done.experts.parameters()
                 if is_unpartitioned(param)]  # yapf: disable
        seen["unpartitioned"] = max(seen["unpartitioned"], sum(param.numel() for param in whole))
        del whole
        construct(layer, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "_configure_expert_parallel", watched_replacement), \
            mock.patch.object(AutoEPMoELayer, "__init__", watched_construction), _traffic(seen):
        try:
            engine = deepspeed.initialize(model=model, config=config)[0]
        except _Replaced:
            return seen
    gc.collect()
    seen["alive_after_init"] = alive()
    engine.destroy()
    return seen


@contextlib.contextmanager
def _traffic(seen):
    """Add up the bytes of the exchanges inside the block; none where the overlay is off."""
    partitioning = sys.modules.get("deepspeed.runtime.zero.expert_partitioning")
    if partitioning is None:
        yield
        return
    exchange = partitioning.exchange

    def counted_exchange(*args):
        traffic = exchange(*args)
        seen["sent"] += traffic.sent
        seen["received"] += traffic.received
        return traffic

    with mock.patch.object(partitioning, "exchange", counted_exchange):
        yield
