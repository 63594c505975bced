# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What a model records while it runs is what the unmodified model records, with its experts spread over ranks.

Router logits, hidden states and the auxiliary loss are computed by the family's own code. What is computed before the
first experts must be the same to the last bit. Experts get the rows of all ranks at once and their results are summed
in the order of a token's choices, not of the experts: from there on float32 rounds differently.
"""
import contextlib

import pytest
import torch

import families
from engines import ds_config
from family_parity import FLOAT32_BOUND, SABOTAGE, check
from ranks import rank_group
from test_families import DOZEN

AUXILIARY_BOUND = 1e-6
WITH_AUXILIARY_LOSS = ["mixtral", "qwen3_moe", "gpt_oss"]
RECORDED = dict(output_router_logits=True, output_hidden_states=True)
# These two keep no router logits in their outputs.
FAMILIES = [family for family in families.names() if family not in ("diffusion_gemma:full", "dots3_note:vision")]

two_ranks = rank_group(2)


def recorded(family, config, called_before=False, sabotage=None):
    """Largest difference over the largest element, of every floating-point tensor of the output: ``name -> error``.

    Tensors of a tuple are numbered: ``router_logits.0``. An error of exactly 0 is equality to the last bit.

    Args:
        called_before: whether the model has run before it is replaced, so that its recorders are installed already.
        sabotage: a key of ``SABOTAGE``, or "nudged router" for weights that differ in the last bit.
    """
    import deepspeed
    import deepspeed.comm as dist

    model = families.build(family)
    reference = model if called_before else families.build(family)
    batch = families.inputs(family, model, seed=100 + dist.get_rank())
    with torch.no_grad(), contextlib.ExitStack() as stack:
        expected = _tensors(reference(**batch, **RECORDED))
        if sabotage == "nudged router":
            _nudge_routers(model)
        elif sabotage is not None:
            stack.enter_context(SABOTAGE[sabotage]())
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        try:
            engine.eval()
            found = _tensors(engine(**batch, **RECORDED))
        finally:
            engine.destroy()
    assert {name: tensor.shape for name, tensor in found.items()} == \
        {name: tensor.shape for name, tensor in expected.items()}
    return {
        name: ((found[name] - tensor).abs().max() / tensor.abs().max()).item()
        for name, tensor in expected.items()
    }


def _tensors(output):
    numbered = {f"{name}.{number}": tensor for name, value in output.items() if isinstance(value, tuple)
                for number, tensor in enumerate(value)}  # yapf: disable
    return {name: tensor for name, tensor in {**output, **numbered}.items() if torch.is_tensor(tensor)}


def _nudge_routers(model):
    from deepspeed.module_inject.experts_only import find_experts
    from deepspeed.moe.experts_interface import router_parameters

    for spec in find_experts(model):
        for param in router_parameters(model, spec.moe_module_name):
            param.copy_(param.nextafter(torch.full_like(param, 9)))


def assert_recorded(results, exact=("hidden_states.0", "router_logits.0")):
    for errors in results:
        assert not any(errors[name] for name in exact), errors
        assert errors.get("aux_loss", 0) <= AUXILIARY_BOUND, errors
        assert max(errors.values()) <= FLOAT32_BOUND, errors


@pytest.mark.parametrize(
    "family", [family if family in DOZEN else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
def test_every_family(two_ranks, family):
    results = two_ranks.run(recorded, family, ds_config(2))
    if family in WITH_AUXILIARY_LOSS:
        assert "aux_loss" in results[0]
    if family == "deepseek_v4":  # its first experts are chosen by the token's id, which records no logits
        assert_recorded(results, exact=["hidden_states.0"])
    else:
        assert_recorded(results)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("family", WITH_AUXILIARY_LOSS)
def test_other_stages(two_ranks, family, stage):
    assert_recorded(two_ranks.run(recorded, family, ds_config(2, zero=dict(stage=stage))))


def test_a_model_that_ran_before_it_is_replaced(two_ranks):
    assert_recorded(two_ranks.run(recorded, "qwen3_moe", ds_config(2), called_before=True))


@pytest.mark.parametrize("sabotage,wrong", [("nudged router", "router_logits.0"),
                                            ("one dropped pair", "router_logits.1"), ("swapped shards", "aux_loss")])
def test_the_comparison_notices(two_ranks, sabotage, wrong):
    """The negative controls: one bit of a router, one token's expert, experts of another rank."""
    for errors in two_ranks.run(recorded, "qwen3_moe", ds_config(2), sabotage=sabotage):
        with pytest.raises(AssertionError):
            assert_recorded([errors])
        assert errors[wrong] > (0 if wrong == "router_logits.0" else AUXILIARY_BOUND)


def _with_auxiliary_loss(model, rank, seed):
    return dict(families.inputs("", model, seed), output_router_logits=True)


@pytest.mark.parametrize("family", WITH_AUXILIARY_LOSS)
def test_training_on_the_auxiliary_loss(two_ranks, family):
    """It reaches the routers through what was recorded; ``scalar_loss`` counts it as it counts the logits."""
    check(two_ranks, family, ds_config(2), make_inputs=_with_auxiliary_loss)
