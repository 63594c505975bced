# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism x ZeRO-3 with whole blocks replaced computes what the unmodified model computes in one process.

Loss, every gradient and the weights after three AdamW steps are compared; an error is the largest difference over the
largest element of the reference.
"""
import pytest
import torch
from deepspeed.module_inject.auto_ep_config import PRESET_MODELS

import parity
import tiny_models
from engines import ADAMW, ds_config
from ranks import rank_group

FLOAT32_BOUND = 1e-5
# bfloat16 rounds to 8 significant bits (2**-8 = 0.4%) and the dispatch adds in another order: a few roundings' worth
# over three steps. A router's gradient is the worst, a difference of nearly equal expert outputs (0.16 seen, others
# below 0.05); weights move by lr per step at most, and so differ by less.
BF16_BOUND = {"loss": 2e-3, "gradient": 0.2, "weight": 2e-2}

two_ranks = rank_group(2)
four_ranks = rank_group(4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """``checkpoint(family, **overrides)``: the folder of a tiny model, made once per module."""
    made = {}

    def make(family, **overrides):
        key = (family, *sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            tiny_models.build(family, **overrides).save_pretrained(folder)
            made[key] = str(folder)
        return made[key]

    return make


def assert_parity(results, bound=FLOAT32_BOUND):
    for errors in results:
        for kind in ("loss", "gradient", "weight"):
            limit = bound[kind] if isinstance(bound, dict) else bound
            beyond = {name: error for name, error in errors[kind].items() if not error <= limit}
            assert not beyond, f"{kind} beyond {limit}: {beyond}"


@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks(two_ranks, checkpoint, ep):
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY)
    assert_parity(two_ranks.run(parity.compare, checkpoint("qwen3_moe"), ds_config(ep, preset="qwen3_moe"), batches))


@pytest.mark.parametrize("ep,experts", [(1, 6), (2, 6), (4, 8)])
def test_four_ranks(four_ranks, checkpoint, ep, experts):
    batches = parity.make_batches(4, 3, tiny_models.VOCABULARY)
    model = checkpoint("qwen3_moe", num_experts=experts)
    assert_parity(four_ranks.run(parity.compare, model, ds_config(ep, preset="qwen3_moe"), batches))


def test_sizes_that_do_not_divide_by_the_number_of_ranks(four_ranks, checkpoint):
    model = checkpoint("qwen3_moe", experts_implementation="eager", **tiny_models.ODD_SIZES)
    config = ds_config(2, block={"use_grouped_mm": False}, preset="qwen3_moe")
    batches = parity.make_batches(4, 3, tiny_models.VOCABULARY)
    assert_parity(four_ranks.run(parity.compare, model, config, batches, experts_implementation="eager"))


@pytest.mark.parametrize("ep", [1, 2])
def test_an_expert_without_tokens(two_ranks, checkpoint, ep):
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY, distinct_tokens=2, length=4)
    results = two_ranks.run(parity.compare, checkpoint("qwen3_moe"), ds_config(ep, preset="qwen3_moe"), batches)
    assert all(errors["idle"] for errors in results), "every expert saw a token: the case tests nothing"
    assert_parity(results)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_rank_with_padding_only(two_ranks, checkpoint, ep):
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY, all_padding_rank=1)
    assert_parity(two_ranks.run(parity.compare, checkpoint("qwen3_moe"), ds_config(ep, preset="qwen3_moe"), batches))


@pytest.mark.parametrize("ep", [1, 2])
def test_bf16(two_ranks, checkpoint, ep):
    # Every expert is chosen: rounding cannot send a token to another expert, which would be no error but a jump.
    model = checkpoint("qwen3_moe", num_experts_per_tok=tiny_models.EXPERTS)
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY)
    config = ds_config(ep, dtype="bf16", preset="qwen3_moe")
    assert_parity(two_ranks.run(parity.compare, model, config, batches, dtype="bfloat16"), BF16_BOUND)


@pytest.mark.presets
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_preset(two_ranks, checkpoint, family):
    preset = "qwen3_moe" if family == "qwen2_moe" else family
    if preset not in PRESET_MODELS:
        pytest.skip(f"this DeepSpeed has no preset {preset}")
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY)
    config = ds_config(2, preset=preset)
    assert_parity(two_ranks.run(parity.compare, checkpoint(family), config, batches))


CHANGES = [dict(lr=2e-3, weight_decay=0.5), dict(lr=8e-3, betas=(0.5, 0.6)), dict(lr=0.0)]
FACTORS = [1.0, 0.1, 2.0, 1.0]  # of ADAMW's learning rate, step by step; a scheduler asks for one more than is used


def client_optimizer(model):
    """An optimizer that the caller made from the source parameters, and a scheduler of it."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return dict(optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS.__getitem__))


def scheduler_of_the_engines_optimizer(model):
    return dict(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS.__getitem__))


@pytest.mark.parametrize("initialize", [None, client_optimizer])
def test_experts_follow_a_manual_change_of_hyperparameters(two_ranks, checkpoint, initialize):
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY)
    assert_parity(two_ranks.run(parity.compare, checkpoint("qwen3_moe"), _config_for(initialize), batches,
                                hyperparameters=CHANGES, initialize=initialize))  # yapf: disable


@pytest.mark.parametrize("preset,stage", [("qwen3_moe", 1), ("qwen3_moe", 3), (None, 1), (None, 2), (None, 3)])
@pytest.mark.parametrize("initialize", [scheduler_of_the_engines_optimizer, client_optimizer])
def test_experts_follow_the_scheduler(two_ranks, checkpoint, initialize, preset, stage):
    rates = [dict(lr=ADAMW["lr"] * factor) for factor in FACTORS]
    batches = parity.make_batches(2, 3, tiny_models.VOCABULARY)
    config = _config_for(initialize, preset, stage)
    assert_parity(two_ranks.run(parity.compare, checkpoint("qwen3_moe"), config, batches, hyperparameters=rates,
                                initialize=initialize, scheduled=True))  # yapf: disable


def _config_for(initialize, preset="qwen3_moe", stage=3):
    config = ds_config(2, preset=preset, zero=dict(stage=stage))
    if initialize is client_optimizer:
        del config["optimizer"]
    return config


def test_the_comparison_notices_a_wrong_expert(two_ranks, checkpoint):
    """The negative control: another checkpoint for the engine than for the reference."""
    batches = parity.make_batches(2, 1, tiny_models.VOCABULARY)
    results = two_ranks.run(parity.compare,
                            checkpoint("qwen3_moe"),
                            ds_config(2, preset="qwen3_moe"),
                            batches,
                            engine_checkpoint=checkpoint("qwen3_moe", seed=1))
    with pytest.raises(AssertionError):
        assert_parity(results)
