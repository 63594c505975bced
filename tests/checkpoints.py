# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Train, save and load tiny engines on the ranks of a group, so that runs of different topologies can be compared.

Every run trains on the same samples whatever its number of ranks: four per step, shared equally by the ranks.
"""
import contextlib
import gc

import numpy as np
import torch
import torch.nn.functional as F

import families
from engines import ds_config
from parity import gathered

SAMPLES = 4
# For rank groups: all of them together import these once.
PRELOAD = ("deepspeed", "transformers.models.qwen3_moe.modeling_qwen3_moe")
# Sizes that no number of ranks divides, so that shards are padded.
SIZES = dict(hidden_size=33, moe_intermediate_size=15)


def config(autoep_size, zero=None, **top_level):
    """A DeepSpeed configuration with a schedule; some parameters are small enough to stay gathered, others not."""
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 5e-3, "warmup_num_steps": 20}}
    return ds_config(autoep_size, {"stage3_param_persistence_threshold": 40, **(zero or {})}, scheduler=schedule,
                     **top_level)  # yapf: disable


@contextlib.contextmanager
def engine_for(configuration, seed=0, freeze=None, **build_arguments):
    """An engine for a tiny qwen3_moe; its experts' parameters and all others may be frozen.

    Args:
        freeze: None, ``("only", ends)`` for parameters whose names end so, or ``("all but", ends)`` for all others.
    """
    import deepspeed

    model = families.build("qwen3_moe", seed=seed, **{**SIZES, **build_arguments})
    for name, param in model.named_parameters():
        if freeze is not None:
            param.requires_grad_(name.endswith(freeze[1]) == (freeze[0] == "all but"))
    if freeze is not None:  # as PEFT does: DeepSpeed gathers no weights in backward where a module's inputs need none
        model.enable_input_require_grads()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=model, config=configuration, model_parameters=trained)[0]
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model, trained
        gc.collect()


def train(engine, steps):
    """The loss of each step, the mean over all samples: next-token cross entropy."""
    import deepspeed.comm as dist

    rank, share = dist.get_rank(), SAMPLES // dist.get_world_size()
    losses = []
    for step in steps:
        tokens = torch.randint(families.VOCABULARY, (SAMPLES, 8), generator=torch.Generator().manual_seed(step))
        ids = tokens[rank * share:(rank + 1) * share]
        logits = engine(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def state_of(engine, moments=True):
    """Whole weights in float32 as arrays, ``name@fp32``, and what else is to be resumed; collective.

    Args:
        moments: whether the optimizer has taken or loaded a step: its tensors as ``name@exp_avg`` too.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors = {f"{name}@fp32": tensor for name, tensor in gathered(engine.module, safe_get_full_fp32_param).items()}
    for key in ("exp_avg", "exp_avg_sq") if moments else ():
        found = gathered(engine.module, lambda param: safe_get_full_optimizer_state(param, key))
        tensors.update({f"{name}@{key}": tensor for name, tensor in found.items()})
    tensors.update({f"{name}@frozen": tensor for name, tensor in _frozen(engine).items()})
    return {
        "tensors": {name: tensor.numpy() for name, tensor in tensors.items()},
        "optimizer steps": sorted({float(state["step"]) for state in engine.optimizer.optimizer.state.values()}),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "schedule": engine.lr_scheduler.state_dict(),
        "lr": sorted(set(engine.get_lr())),  # of each group of parameters; EP makes more of them
    }  # yapf: disable


def _frozen(engine):
    """The frozen parameters, whole, with experts of all ranks."""
    from deepspeed.runtime.zero import GatheredParameters

    frozen = {name: param for name, param in engine.module.named_parameters() if not param.requires_grad}
    try:
        with GatheredParameters(list(frozen.values())):
            for param in frozen.values():
                param.requires_grad_(True)  # or they would be left out
            found = gathered(engine.module, lambda param: param.detach())
    finally:
        for param in frozen.values():
            param.requires_grad_(False)
    return {name: found[name] for name in frozen}


def saved_run(folder, configuration, steps=2, more=3, **arguments):
    """Train, save to ``folder``, return the state then, and the losses of the steps after it."""
    with engine_for(configuration, **arguments) as engine:
        train(engine, range(steps))
        engine.save_checkpoint(folder, client_state={"note": [1, 2]})
        return {"state": state_of(engine), "losses": train(engine, range(steps, steps + more))}


def loaded_run(folder, configuration, steps=2, more=3, load=None, moments=True, **arguments):
    """Load ``folder`` into an engine with other weights, return the state then, and the losses of the next steps."""
    with engine_for(configuration, seed=1, **arguments) as engine:
        _, client_state = engine.load_checkpoint(folder, **(load or {}))
        return {
            "note": client_state.get("note"),
            "state": state_of(engine, moments),
            "losses": train(engine, range(steps, steps + more)),
        }


def refused_load(folder, configuration, load=None, **arguments):
    """Load ``folder``, which must fail; return the error, and whether every weight is as it was."""
    with engine_for(configuration, seed=1, **arguments) as engine:
        before = state_of(engine, moments=False)["tensors"]
        try:
            engine.load_checkpoint(folder, **(load or {}))
        except Exception as error:
            after = state_of(engine, moments=False)["tensors"]
            return f"{type(error).__name__}: {error}", all((after[name] == before[name]).all() for name in before)
        return None, False


def assert_same_state(found, expected):
    """Every tensor to the last bit, and the counters."""
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, array in expected["tensors"].items():
        np.testing.assert_array_equal(found["tensors"][name], array, err_msg=name)
    for key in ("optimizer steps", "counters", "schedule", "lr"):
        assert found[key] == expected[key], key
