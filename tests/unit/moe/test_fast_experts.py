# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Which families the kernels compute, with what formula, and that training with them equals the unmodified model."""
from unittest import mock

import pytest
import torch

import families
from deepspeed.moe.expert_activations import Activation
from deepspeed.moe.experts_interface import is_experts_module
from deepspeed.moe.fast_experts import FastExperts
from engines import ds_config
from family_parity import FLOAT32_BOUND, assert_parity, compare_family, one_token
from ranks import rank_group

two_ranks = rank_group(2, TRITON_INTERPRET="1")

SILU = Activation("silu")
FORMULAS = {
    "qwen3_moe": SILU,
    "deepseek_v3": SILU,
    "gpt_oss": Activation("silu", is_interleaved=True, alpha=1.702, limit=7.0, offset=1.0),
    "openai_privacy_filter": Activation("silu", alpha=1.702, limit=7.0, offset=1.0),
    "deepseek_v4": Activation("silu", limit=10.0),
    "nemotron_h": Activation("relu2", has_up=False),
    "gemma4": Activation("gelu_tanh"),
}


def _fast(family):
    model = families.build(family)
    module = next(module for module in model.modules() if is_experts_module(module))
    with mock.patch("deepspeed.moe.fast_experts.why_no_grouped_gemm", lambda: None):
        return FastExperts.of(module)


@pytest.mark.parametrize("family", FORMULAS)
def test_formula(family):
    assert _fast(family) == FastExperts(FORMULAS[family])


@pytest.mark.parametrize("family, reason", [("muse_spark", "modules with parameters"), ("step3p7", "does not say")])
def test_a_family_that_stays_as_it_is(family, reason):
    assert reason in _fast(family).why_not


def compare(family, config, **options):
    from deepspeed.moe import fast_experts

    with mock.patch.object(fast_experts, "compute_experts", wraps=fast_experts.compute_experts) as compute:
        errors = compare_family(family, config, experts_implementation="grouped_mm", **options)
    return compute.call_count > 0, errors


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_training(two_ranks, family, ep):
    used, errors = zip(*two_ranks.run(compare, family, ds_config(ep), partitioned=True))
    assert all(used)
    assert_parity(errors, FLOAT32_BOUND)


def test_a_rank_without_rows(two_ranks):
    used, errors = zip(*two_ranks.run(compare, "qwen3_moe", ds_config(2), make_inputs=one_token))
    assert all(used)
    assert_parity(errors, FLOAT32_BOUND)


def graph_breaks():
    """Breaks in a compiled forward around experts on one rank, and the largest difference from the plain one."""
    import deepspeed.comm as dist
    from deepspeed.moe.expert_compute import ExpertWeights, compute_experts
    from deepspeed.moe.expert_dispatch import dispatched_forward
    from deepspeed.utils import groups
    from torch._dynamo.utils import counters

    groups._create_expert_and_data_parallel(1)
    group = groups._get_expert_parallel_group("ep_size_1")
    assert dist.get_world_size(group=group) == 1
    up, down = torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    indices, weights = torch.randint(4, (6, 2)), torch.rand(6, 2)

    def compute(*routed):
        return compute_experts(ExpertWeights((up, ), down, SILU), *routed)

    def forward(tokens):
        return last(dispatched_forward(compute, first(tokens), indices, weights, 4, group))

    tokens = torch.randn(6, 16)
    expected = forward(tokens)
    counters.clear()
    found = torch.compile(forward, backend="eager")(tokens)
    return sum(counters["graph_break"].values()), float((found - expected).abs().max())


def test_one_graph_break_under_compile(two_ranks):
    assert [breaks for breaks, difference in two_ranks.run(graph_breaks) if difference < 1e-5] == [1, 1]
