# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank holds while an engine trains under ZeRO-3: part by part, all together, and at the worst moment.

Layers are recomputed in backward (activation checkpointing), as they are wherever memory is scarce.
"""
import gc

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

import tiny_models
from engines import engine_of
from init_memory import LiveBytes


def trained_memory(checkpoint, config, dtype="float32", **from_pretrained):
    """Train an engine for four steps and return this rank's bytes after the last one.

    Returns a dict: ``weights``, partitions and whole parameters that stay gathered; ``gradients``, their partitions;
    ``optimizer``, float32 partitions and moments; ``training``, all tensors together; ``backward`` and ``step``, what
    was alive on top of these at the worst moment of a forward and backward, and of an optimizer step.
    """
    with LiveBytes() as counted, engine_of(checkpoint, config, dtype=dtype, **from_pretrained) as engine:
        engine.module.train()  # transformers recompute in training mode only
        engine.module.gradient_checkpointing_enable()
        _train_step(engine, counted)  # the first one traces modules
        steps = [_train_step(engine, counted) for _ in range(3)]
        # The least of each: garbage that Python has not collected yet adds to some, as it happens.
        peaks = {phase: min(step[phase] for step in steps) for phase in steps[0]}
        gc.collect()
        optimizer, params = engine.optimizer, list(engine.module.parameters())
        kept = [param for param in params if param.ds_status is ZeroParamStatus.AVAILABLE]
        moments = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values()]
        return {
            "weights": _bytes([param.ds_tensor for param in params] + kept),
            "gradients": _bytes([optimizer.grad_partitions_flat_buffer]),
            "optimizer": _bytes(optimizer.fp32_partitioned_groups_flat + moments),
            "training": counted.live,
            **{
                phase: peak - counted.live
                for phase, peak in peaks.items()
            },
        }


def _train_step(engine, counted):
    peaks = {}
    ids = torch.arange(1, 5).reshape(1, 4) % tiny_models.VOCABULARY  # few tokens: activations are not estimated
    gc.collect()
    counted.reset()
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    peaks["backward"] = counted.peak
    gc.collect()
    counted.reset()
    engine.step()
    peaks["step"] = counted.peak
    return peaks


def _bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)
