# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Frozen experts, and an optimizer of the caller's, whose groups know nothing of experts, at every ZeRO stage."""
import pytest
import torch

import families
from engines import ADAMW, ds_config
from family_parity import BF16_BOUND, check
from ranks import rank_group

two_ranks = rank_group(2)


def freeze_experts(model):
    for module in _experts(model):
        module.requires_grad_(False)


def freeze_experts_of_every_other_layer(model):
    for module in _experts(model)[::2]:
        module.requires_grad_(False)


def _experts(model):
    from deepspeed.moe.experts_interface import is_experts_module

    return [module for module in model.modules() if is_experts_module(module)]


def all_parameters(model):
    """Frozen ones as well, as a script may pass them."""
    return dict(model_parameters=list(model.parameters()))


def client_optimizer(model):
    return dict(optimizer=torch.optim.AdamW(model.parameters(), **ADAMW), model_parameters=None)


def client_groups(model):
    """Experts in a group of their own, before all others."""
    experts = [param for module in _experts(model) for param in module.parameters()]
    rest = [param for param in model.parameters() if all(param is not other for other in experts)]
    return dict(optimizer=torch.optim.AdamW([dict(params=experts), dict(params=rest)], **ADAMW), model_parameters=None)


def client_function(model):
    return dict(optimizer=lambda params: torch.optim.AdamW(params, **ADAMW), model_parameters=None)


CLIENTS = [client_optimizer, client_groups, client_function]
# Stages 0 and 3 ask for no groups of experts: nothing may change for them.
STAGES = [1, 2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))]


def config_of(stage, initialize, dtype=None):
    config = ds_config(2, zero=dict(stage=stage), dtype=dtype)
    if initialize in CLIENTS:
        del config["optimizer"]
    return config


@pytest.mark.parametrize("initialize", [None, all_parameters, client_optimizer, client_groups])
@pytest.mark.parametrize(
    "prepare",
    [freeze_experts, pytest.param(freeze_experts_of_every_other_layer, marks=pytest.mark.floor)])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_experts(two_ranks, stage, prepare, initialize):
    check(two_ranks, "mixtral", config_of(stage, initialize), prepare=prepare, initialize=initialize)


@pytest.mark.parametrize("initialize", CLIENTS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_callers_optimizer(two_ranks, stage, initialize):
    check(two_ranks, "gpt_oss", config_of(stage, initialize), initialize=initialize)


@pytest.mark.parametrize("prepare,initialize", [(freeze_experts, None), (None, client_optimizer)])
@pytest.mark.parametrize("stage", [1, 2])
def test_bf16(two_ranks, stage, prepare, initialize):
    """Stage 1 has another optimizer in bf16."""
    config = config_of(stage, initialize, dtype="bf16")
    check(two_ranks, "gpt_oss", config, BF16_BOUND, dtype=torch.bfloat16, prepare=prepare, initialize=initialize,
          num_experts_per_tok=families.EXPERTS)  # yapf: disable
