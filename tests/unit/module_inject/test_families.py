# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Every family of Transformers computes with its experts spread over ranks what it computes in one process.

Loss, the gradient at the model's entry, every gradient and the weights after two AdamW steps are compared; an error
is the largest difference over the largest element of the reference. ``make test-families`` runs all families and
writes the matrix that ``ds_autoep families`` prints; a dozen that differ in kind run in ``make test``.
"""
import os

import pytest
import torch

import families
from engines import ds_config
from family_parity import (BF16_BOUND, FLOAT32_BOUND, SABOTAGE, assert_parity, check, compare_family, one_token,
                           vision_on_rank_0)
from ranks import rank_group

# Biases and transposed weights; no gate; a norm after the experts; sliding windows and shared experts; a router in
# the decoder layer; experts that are skipped; a state-space model; two experts modules in a layer, tied ones, ...
DOZEN = [
    "gpt_oss", "nemotron_h", "muse_spark", "openai_privacy_filter", "mixtral", "qwen3_moe", "deepseek_v3", "gemma4",
    "zaya", "ernie4_5_vl_moe:both", "diffusion_gemma:full", "dots3_note:vision", "step3p7"
]

two_ranks, four_ranks = rank_group(2), rank_group(4)


@pytest.fixture(scope="module")
def matrix():
    """What was found, by family; written to the file that the command line prints when the environment says so."""
    found = {}
    yield found
    if os.environ.get("DS_AUTOEP_RECORD_FAMILIES"):
        from deepspeed.moe.experts_interface import UNSUPPORTED_FAMILIES
        from deepspeed_autoep import family_matrix
        family_matrix.write(found, UNSUPPORTED_FAMILIES)


@pytest.mark.parametrize(
    "family",
    [family if family in DOZEN else pytest.param(family, marks=pytest.mark.slow) for family in families.names()])
@pytest.mark.families
def test_every_family(two_ranks, matrix, family):
    results = check(two_ranks, family, ds_config(2))
    matrix[family] = {kind: max(max(errors[kind].values()) for errors in results)
                      for kind in ("loss", "gradient", "weight")}  # yapf: disable
    matrix[family]["experts"] = results[0]["experts"]


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("muse_spark", marks=pytest.mark.slow)])
def test_stages_and_degrees(four_ranks, family, stage, ep):
    check(four_ranks, family, ds_config(ep, zero=dict(stage=stage)))


@pytest.mark.parametrize("family", [family for family in DOZEN if family not in ("gpt_oss", "muse_spark")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow
def test_stages_of_the_dozen(four_ranks, family, stage):
    for ep in (1, 2, 4):
        check(four_ranks, family, ds_config(ep, zero=dict(stage=stage)))


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("family", DOZEN)
def test_partitioned_models(two_ranks, family, ep):
    """Under ``zero.Init``, and with the grouped GEMMs that users have by default."""
    implementation = "eager" if family == "step3p7" else "grouped_mm"
    check(two_ranks, family, ds_config(ep), partitioned=True, experts_implementation=implementation)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "muse_spark", "openai_privacy_filter", "deepseek_v3"])
def test_bf16(two_ranks, family, stage):
    """Families mix dtypes, such as float32 routing weights with bf16 tokens."""
    grouped = dict(topk_group=2) if family in ("nemotron_h", "deepseek_v3") else {}
    check(two_ranks, family, ds_config(2, zero=dict(stage=stage), dtype="bf16"), BF16_BOUND, dtype=torch.bfloat16,
          num_experts_per_tok=families.EXPERTS, **grouped)  # yapf: disable


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_the_comparison_notices(two_ranks, sabotage):
    """The negative controls: what a wrong dispatch would do is found."""
    results = two_ranks.run(compare_family, "gpt_oss", ds_config(2), sabotage=sabotage)
    with pytest.raises(AssertionError, match="beyond"):
        assert_parity(results, FLOAT32_BOUND)


def test_experts_that_do_not_come_in_powers_of_two(two_ranks):
    check(two_ranks, "qwen3_moe", ds_config(2), num_experts=6, num_experts_per_tok=3)


@pytest.mark.parametrize("family", ["gpt_oss", "ernie4_5_vl_moe:both"])
def test_layers_recomputed_in_backward(two_ranks, family):
    check(two_ranks, family, ds_config(2), recompute=True)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["zaya", "gpt_oss", "muse_spark"])
def test_a_rank_without_rows(two_ranks, family, implementation):
    check(two_ranks, family, ds_config(2), make_inputs=one_token, experts_implementation=implementation)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_called_on_some_ranks_only(two_ranks, stage, recompute):
    config = ds_config(2, zero=dict(stage=stage))
    check(two_ranks, "ernie4_5_vl_moe:both", config, make_inputs=vision_on_rank_0, recompute=recompute)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_called_on_some_of_four_ranks(four_ranks, ep):
    check(four_ranks, "ernie4_5_vl_moe:both", ds_config(ep), make_inputs=vision_on_rank_0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_selection_bias_that_was_unfrozen(two_ranks, stage):
    """It gets no gradient where its router is called: ranks that do not call it must not differ."""
    check(two_ranks, "ernie4_5_vl_moe:both", ds_config(2, zero=dict(stage=stage)), make_inputs=vision_on_rank_0,
          prepare=torch.nn.Module.requires_grad_)  # yapf: disable
