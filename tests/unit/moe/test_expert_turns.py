# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Layers with several experts modules when the model is copied; their parity is in ``test_families.py``."""
import copy

import pytest

import families
from engines import autoep_layers, ds_config
from family_parity import FLOAT32_BOUND, vision_on_rank_0
from parity import relative_errors
from ranks import rank_group

FAMILY = "ernie4_5_vl_moe:both"

two_ranks = rank_group(2)


def copied_model(stage):
    """Errors of the experts' gradients in a deep copy of an engine's model, and how many the original got."""
    import deepspeed
    import deepspeed.comm as dist

    rank, reference, model = dist.get_rank(), families.build(FAMILY), families.build(FAMILY)
    for other in range(2):
        families.scalar_loss(reference(**vision_on_rank_0(reference, other, other))).backward()
    config = ds_config(2, zero=dict(stage=stage))
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    twin = copy.deepcopy(engine.module)
    families.scalar_loss(twin(**vision_on_rank_0(twin, rank, rank))).backward()
    errors = {}
    for name in autoep_layers(twin):
        expected = {f"{name}.{key}": param.grad.chunk(2)[rank]
                    for key, param in reference.get_submodule(name).named_parameters()}  # yapf: disable
        found = {f"{name}.{key}": param.grad for key, param in twin.get_submodule(name).named_parameters()}
        errors.update(relative_errors(found, expected))
    touched = [name for name, param in engine.module.named_parameters() if param.grad is not None]
    engine.destroy()
    return errors, touched


@pytest.mark.parametrize("stage", [0, 2])
def test_a_deep_copy_takes_turns_of_its_own(two_ranks, stage):
    """Some experts are called on rank 0 alone: the backward of those that took part must be in the copy's graph."""
    for errors, touched in two_ranks.run(copied_model, stage):
        assert errors and max(errors.values()) < FLOAT32_BOUND, errors
        assert not touched
