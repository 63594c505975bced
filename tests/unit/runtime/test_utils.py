# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Without ZeRO gradients are clipped by the length of all of them, wherever experts are."""
import pytest
import torch

import families
from engines import ds_config
from family_parity import gradient_of
from parity import gathered
from ranks import rank_group

two_ranks, four_ranks = rank_group(2), rank_group(4)


def clipped(config, norm_type):
    """The norm that clipping to half of it finds, that of the gathered gradients before, and after."""
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.runtime.engine import clip_grad_norm_

    model = families.build("mixtral", num_experts=8)
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    engine.backward(families.scalar_loss(engine(**families.inputs("mixtral", model, seed=dist.get_rank()))))

    def length():
        gradients = gathered(engine.module, gradient_of).values()
        return torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients], norm_type).item()

    before = length()
    found = clip_grad_norm_(engine.module.parameters(), before / 2, norm_type)
    after = length()
    engine.destroy()
    return found.item(), before, after


def check(group, config, norm_type):
    for found, before, after in group.run(clipped, config, norm_type):
        assert found == pytest.approx(before, rel=1e-5)
        assert after == pytest.approx(before / 2, rel=1e-5)


@pytest.mark.floor
@pytest.mark.parametrize("norm_type", [2, 3])
def test_two_ranks(two_ranks, norm_type):
    check(two_ranks, ds_config(2, zero=dict(stage=0)), norm_type)


@pytest.mark.parametrize("ep", [2, 4])
def test_four_ranks(four_ranks, ep):
    check(four_ranks, ds_config(ep, zero=dict(stage=0)), 2)
