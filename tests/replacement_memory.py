# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that ``deepspeed.initialize`` holds while it replaces the MoE layers of a model built under ``zero.Init``."""
import gc
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
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


def is_unpartitioned(param):
    return param.numel() > 0 or not hasattr(param, "ds_id")


def measure(layers, ep, config=None):
    """Build a model of ``layers`` layers under ``zero.Init``, initialize an engine and return what was seen.

    Returns a dict: ``peak`` and ``end``, bytes above those before replacement, at the worst moment and after it;
    ``unpartitioned``, elements of finished layers' experts that were whole while the next was built, at most;
    ``alive_after_replacement`` and ``alive_after_init``, the part of the source experts' bytes that was not freed.
    """
    with LiveBytes() as counted:
        return _build_and_initialize(layers, config or ds_config(ep), counted)


def _build_and_initialize(layers, config, counted):
    import deepspeed
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # imported before zero.Init patches torch

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **SIZES))
    sources = [(weakref.ref(param), param.ds_tensor.nbytes) for name, param in model.named_parameters()
               if ".experts." in name]  # yapf: disable
    gc.collect()
    seen = {"unpartitioned": 0}
    replace, construct = DeepSpeedEngine._configure_expert_parallel, AutoEPMoELayer.__init__

    def alive():
        return sum(size for param, size in sources if param() is not None) / sum(size for _, size in sources)

    def watched_replacement(engine, model, *args, **kwargs):
        before = counted.peak = counted.live
        replaced = replace(engine, model, *args, **kwargs)
        seen["peak"], seen["end"] = counted.peak - before, counted.live - before
        seen["alive_after_replacement"] = alive()
        return replaced

    def watched_construction(layer, *args, **kwargs):
        whole = [param for done in autoep_layers(model).values() for param in done.experts.parameters()
                 if is_unpartitioned(param)]  # yapf: disable
        seen["unpartitioned"] = max(seen["unpartitioned"], sum(param.numel() for param in whole))
        del whole
        construct(layer, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "_configure_expert_parallel", watched_replacement), \
            mock.patch.object(AutoEPMoELayer, "__init__", watched_construction):
        engine = deepspeed.initialize(model=model, config=config)[0]
    gc.collect()
    seen["alive_after_init"] = alive()
    engine.destroy()
    return seen
