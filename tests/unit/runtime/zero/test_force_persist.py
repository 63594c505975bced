# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``ds_force_persist``: a marked parameter stays gathered, and every router parameter is marked.

What is counted is gathers of router parameters inside forward and backward. The optimizer changes the shards, so each
step ends with one gather of all persistent parameters together; that one is counted apart, and must stay one.
"""
import contextlib
from collections import Counter
from unittest import mock

import pytest

import tiny_models
from engines import autoep_layers, ds_config, engine_of
from ranks import rank_group

two_ranks = rank_group(2)
two_ranks_without = rank_group(2, DS_AUTOEP_OFF="force-persist")

HIDDEN, EXPERTS = 24, 12  # a router has 288 elements, more than the Trainer's "auto" threshold of 10 x hidden
ROUTER = HIDDEN * EXPERTS
STEPS = 4

# Nothing is kept for its next use, so that only persistence keeps a parameter gathered.
_RELEASE_AT_ONCE = dict(stage3_max_reuse_distance=0, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0)
THRESHOLDS = {
    "a router above the parameter threshold": dict(stage3_param_persistence_threshold=10),
    "a model threshold below one router": dict(stage3_model_persistence_threshold=ROUTER - 1),
    "earlier small parameters used it up": dict(stage3_param_persistence_threshold=ROUTER,
                                                stage3_model_persistence_threshold=2 * ROUTER),
    "the Trainer's auto threshold": dict(stage3_param_persistence_threshold=10 * HIDDEN),
}  # yapf: disable
SCHEDULES = {
    "plain": {},
    "gradient accumulation": dict(accumulation=2),
    "an eval forward between steps": dict(evaluate=True),
    "an eval forward before the first step": dict(evaluate_first=True),
    "gradient checkpointing": dict(checkpointing=True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny_models.build("qwen3_moe", num_experts=EXPERTS).save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def counted_gathers(watched, phase):
    """Yield a Counter of gathers of the watched parameters, by ``phase[0]`` at the time."""
    from deepspeed.runtime.zero import partition_parameters as zero

    counts = Counter()

    def count(params):
        counts[tuple(phase)] += sum(id(param) in watched for param in params)

    def patched(cls, name, params_of):
        original = getattr(cls, name)

        def counting(self, *args, **kwargs):
            count(params_of(*args, **kwargs))
            return original(self, *args, **kwargs)

        return mock.patch.object(cls, name, counting)

    released = zero.ZeroParamStatus.NOT_AVAILABLE
    with contextlib.ExitStack() as patches:
        patches.enter_context(patched(zero.AllGatherHandle, "__init__", lambda handle, param, *a, **k: [param]))
        patches.enter_context(
            patched(zero.AllGatherCoalescedHandle, "__init__", lambda *a, **k: k.get("params") or a[1]))
        patches.enter_context(
            patched(zero.Init, "_all_gather", lambda params, *a, **k: [p for p in params if p.ds_status == released]))
        yield counts


def gathers_per_step(checkpoint,
                     thresholds,
                     accumulation=1,
                     evaluate=False,
                     evaluate_first=False,
                     checkpointing=False):
    """Train; return (gathers of routers in forward and backward, the same at the end of a step), by step."""
    import torch

    config = ds_config(2,
                       zero={
                           **_RELEASE_AT_ONCE,
                           **thresholds
                       },
                       preset="qwen3_moe",
                       gradient_accumulation_steps=accumulation)
    with engine_of(checkpoint, config) as engine:
        if checkpointing:
            engine.module.gradient_checkpointing_enable()
        routers = {id(p) for layer in autoep_layers(engine.module).values() for p in layer.router.parameters()}
        phase = [0, "pass"]
        with counted_gathers(routers, phase) as counts:

            def forward(length):
                ids = torch.randint(1, tiny_models.VOCABULARY, (2, length))
                return engine(input_ids=ids, labels=ids, use_cache=False).loss

            def eval_forward(length):
                engine.eval()
                with torch.no_grad():
                    forward(length)
                engine.train()

            if evaluate_first:
                eval_forward(3)
            for step in range(STEPS):
                for _ in range(accumulation):
                    phase[:] = step, "pass"
                    engine.backward(forward(4 + step))
                    phase[1] = "step"
                    engine.step()
                phase[1] = "pass"
                if evaluate:
                    eval_forward(5)
        return [[counts[step, kind] for step in range(STEPS)] for kind in ("pass", "step")]


@pytest.mark.floor
@pytest.mark.parametrize("thresholds", THRESHOLDS)
def test_no_router_is_gathered_from_the_second_step_on(two_ranks, two_ranks_without, checkpoint, thresholds):
    for in_passes, at_end in two_ranks.run(gathers_per_step, checkpoint, THRESHOLDS[thresholds]):
        assert in_passes[1:] == [0] * (STEPS - 1)
        assert at_end == [2] * STEPS  # two routers, each once
    for in_passes, _ in two_ranks_without.run(gathers_per_step, checkpoint, THRESHOLDS[thresholds]):
        assert all(in_passes[1:]), "the marker is not needed here: the case tests nothing"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_the_schedule(two_ranks, checkpoint, schedule):
    thresholds = THRESHOLDS["a router above the parameter threshold"]
    for in_passes, at_end in two_ranks.run(gathers_per_step, checkpoint, thresholds, **SCHEDULES[schedule]):
        assert in_passes[1:] == [0] * (STEPS - 1)
        assert at_end == [2] * STEPS


def persistent_names(checkpoint, thresholds, decide_in_init=False):
    """Names of the parameters that stay gathered, and of the marked ones."""
    from deepspeed.runtime.zero.partition_parameters import Init

    with mock.patch.object(Init, "apply_param_persistence", decide_in_init), \
            mock.patch.object(Init, "param_persistence_threshold", 0), \
            engine_of(checkpoint, ds_config(2, zero=thresholds, preset="qwen3_moe")) as engine:
        kept = {id(param) for param in engine.optimizer.persistent_parameters}
        named = list(engine.module.named_parameters())
        return ([name for name, param in named
                 if id(param) in kept], [name for name, param in named if param.ds_persist],
                [name for name, param in named if getattr(param, "ds_force_persist", False)])


ROUTERS = [f"model.layers.{layer}.mlp.router.gate.weight" for layer in range(2)]


@pytest.mark.floor
def test_marked_elements_count_toward_the_model_total(two_ranks, checkpoint):
    # The two norms of the first layer's heads fit beside the two routers; nothing after them does.
    thresholds = dict(stage3_param_persistence_threshold=HIDDEN, stage3_model_persistence_threshold=2 * ROUTER + 16)
    for kept, persistent, marked in two_ranks.run(persistent_names, checkpoint, thresholds):
        assert marked == ROUTERS
        assert kept == persistent
        norms = [f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk"]
        assert sorted(kept) == sorted(norms + ROUTERS)


@pytest.mark.floor
def test_decided_inside_zero_init(two_ranks, checkpoint):
    for kept, persistent, _ in two_ranks.run(persistent_names,
                                             checkpoint,
                                             dict(stage3_param_persistence_threshold=0),
                                             decide_in_init=True):
        assert kept == persistent == ROUTERS


def marks_of_a_router_with_biases():
    """A deepseek_v3 layer whose router has a bias and a correction bias that is a parameter, not a buffer."""
    import deepspeed
    import torch

    model = tiny_models.build("deepseek_v3")
    for module in model.modules():
        if "e_score_correction_bias" in getattr(module, "_buffers", {}):
            bias = module._buffers.pop("e_score_correction_bias")
            module.e_score_correction_bias = torch.nn.Parameter(bias)
            module.bias = torch.nn.Parameter(torch.zeros(tiny_models.EXPERTS))
    engine = deepspeed.initialize(model=model,
                                  config=ds_config(2, preset="deepseek_v3"),
                                  model_parameters=model.parameters())[0]
    try:
        return [
            name for layer in autoep_layers(engine.module).values() for name, param in layer.router.named_parameters()
            if param.ds_force_persist and param.ds_persist
        ]
    finally:
        engine.destroy()


def test_bias_and_trainable_score_correction_bias_are_marked(two_ranks):
    for names in two_ranks.run(marks_of_a_router_with_biases):
        assert sorted(names) == ["e_score_correction_bias", "gate.bias", "gate.weight"]
