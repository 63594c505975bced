# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Expert tensors built under ``zero.Init`` are never whole, and initializers reach every element of them."""
import copy
import pickle

import deepspeed
import pytest
import torch
import torch._dynamo  # noqa: F401  torch imports it when first needed, which fails inside zero.Init

from engines import ds_config
from init_memory import LAYER_BYTES, measure
from ranks import rank_group

two_ranks, three_ranks = rank_group(2), rank_group(3)
three_ranks_without = rank_group(3, DS_AUTOEP_OFF="unfilled-experts")

pytestmark = pytest.mark.floor

SHAPE = (6, 35, 50)


class Experts(torch.nn.Module):
    """Experts of Transformers' interface whose constructor hands its tensor to ``initialize``, as remote code may."""

    _apply_gate = None  # what the interface's decorator leaves on a class

    def __init__(self, initialize=None):
        super().__init__()
        self.num_experts = SHAPE[0]
        self.weight = torch.nn.Parameter(torch.empty(*SHAPE))
        if initialize is not None:
            initialize(self.weight)


class JoinedExperts(Experts):

    def __init__(self):
        super().__init__()
        halves = [torch.empty(*SHAPE[:2], 20).fill_(3.0), torch.empty(*SHAPE[:2], 30).fill_(5.0)]
        self.weight = torch.nn.Parameter(torch.cat(halves, dim=2))


class AssignedExperts(Experts):

    def __init__(self):
        super().__init__()
        self.weight.data = torch.empty(*SHAPE).fill_(7.0)


class ColumnExperts(Experts):

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(*SHAPE[:2], 1).fill_(2.0))


class WrappedExperts(Experts):

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(*SHAPE).fill_(1.0).contiguous())


INITIALIZERS = {  # name -> (initializer, mean, standard deviation)
    "normal_": (lambda t: torch.nn.init.normal_(t, mean=3.0, std=0.5), 3.0, 0.5),
    "method": (lambda t: t.data.normal_(mean=3.0, std=0.5), 3.0, 0.5),
    "uniform_": (lambda t: torch.nn.init.uniform_(t, 1.0, 2.0), 1.5, 12**-0.5),
    "trunc_normal_": (lambda t: torch.nn.init.trunc_normal_(t, mean=1.0, std=0.5, a=0.0, b=2.0), 1.0, 0.44),
    "constant_": (lambda t: torch.nn.init.constant_(t, 7.0), 7.0, 0.0),
    "ones_": (lambda t: torch.nn.init.ones_(t), 1.0, 0.0),
    "zero_": (lambda t: t.detach().zero_(), 0.0, 0.0),
    "in two steps": (lambda t: torch.nn.init.normal_(t).data.mul_(2.0).add_(5.0), 5.0, 2.0),
    "kaiming_uniform_": (lambda t: torch.nn.init.kaiming_uniform_(t, a=1.0), 0.0, (35 * 50)**-0.5),
    "orthogonal_": (lambda t: torch.nn.init.orthogonal_(t), 0.0, (35 * 50)**-0.5),
}  # yapf: disable


def gathered(param):
    with deepspeed.zero.GatheredParameters(param):
        return param.detach().clone()


def initialized(name, in_constructor):
    """Whole weights after an initializer, run in the constructor or, as Transformers does, later in ``zero.Init``."""
    initialize = INITIALIZERS[name][0]
    torch.manual_seed(11)  # as a script does, on all ranks alike
    with deepspeed.zero.Init(config_dict_or_path=ds_config(1)):
        module = Experts(initialize if in_constructor else None)
        if not in_constructor:
            with torch.no_grad():
                initialize(module.weight)
    assert type(module.weight) is torch.nn.Parameter
    whole = gathered(module.weight)
    return whole.mean().item(), whole.std().item(), whole.unique().numel(), tuple(whole.shape)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_same_distribution(three_ranks, name):
    _, mean, std = INITIALIZERS[name]
    needs_the_whole_tensor = name in ("kaiming_uniform_", "orthogonal_")
    for in_constructor in (True, ) if needs_the_whole_tensor else (True, False):
        for seen in three_ranks.run(initialized, name, in_constructor):
            assert seen[0] == pytest.approx(mean, abs=0.03) and seen[1] == pytest.approx(std, rel=0.05, abs=1e-6)
            assert seen[3] == SHAPE
            if std > 0:  # no two ranks drew the same numbers
                assert seen[2] > 0.9 * SHAPE[0] * SHAPE[1] * SHAPE[2]


def test_a_seed_decides_all(three_ranks):
    assert three_ranks.run(initialized, "normal_", False) == three_ranks.run(initialized, "normal_", False)


def first_elements(count):
    """First element of this rank's shard of each of ``count`` expert tensors, initialized one after another."""
    torch.manual_seed(11)
    with deepspeed.zero.Init(config_dict_or_path=ds_config(1)):
        modules = [Experts(torch.nn.init.normal_) for _ in range(count)]
    return [module.weight.ds_tensor[0].item() for module in modules]


def test_no_two_tensors_are_alike(two_ranks):
    firsts = [first for rank in two_ranks.run(first_elements, 200) for first in rank]
    assert len(set(firsts)) == len(firsts)


def transformers_model(autoep_size):
    """Standard deviation of each expert tensor of a model that Transformers initializes inside ``zero.Init``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(num_hidden_layers=1, num_experts=6, hidden_size=32, moe_intermediate_size=16, vocab_size=8,
                 num_attention_heads=1, head_dim=8, intermediate_size=8)  # yapf: disable
    with deepspeed.zero.Init(config_dict_or_path=ds_config(autoep_size)):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, initializer_range=0.02))
    experts = model.model.layers[0].mlp.experts
    return [gathered(param).std().item() for param in experts.parameters()]


def test_transformers_initializers_reach_the_experts(three_ranks, three_ranks_without):
    for deviations in three_ranks.run(transformers_model, 1):
        assert deviations == pytest.approx([0.02, 0.02], rel=0.1)
    for deviations in three_ranks_without.run(transformers_model, 1):
        assert deviations != pytest.approx([0.02, 0.02], rel=0.1), "DeepSpeed fills them by itself"


def test_a_job_without_expert_parallelism_is_left_alone(three_ranks):
    for deviations in three_ranks.run(transformers_model, None):
        assert deviations != pytest.approx([0.02, 0.02], rel=0.1)


def behaviours():
    """What other code may do to an unfilled tensor, and to the parameter afterwards."""
    with deepspeed.zero.Init(config_dict_or_path=ds_config(1)):
        module = Experts()
        by_value = Experts(lambda t: t.data.copy_(torch.arange(t.numel()).view(SHAPE)))
        by_index = Experts(lambda t: [t.data[expert].fill_(expert) for expert in range(SHAPE[0])])
        through_a_view = Experts(lambda t: t.data.mT.normal_().fill_(4.0))
        joined, assigned, columns, wrapped = JoinedExperts(), AssignedExperts(), ColumnExperts(), WrappedExperts()
        outside = torch.empty(SHAPE)  # not of an experts module
    assert type(outside) is torch.Tensor and outside.stride() != (0, 0, 0)
    assert torch.equal(gathered(by_value.weight).flatten(), torch.arange(6. * 35 * 50))
    assert [gathered(by_index.weight)[expert].unique().tolist() for expert in range(6)] == [[e] for e in range(6)]
    assert gathered(joined.weight).mean(dim=(0, 1)).tolist() == [3.0] * 20 + [5.0] * 30
    assert torch.equal(gathered(assigned.weight), torch.full(SHAPE, 7.0))
    assert torch.equal(gathered(columns.weight), torch.full((*SHAPE[:2], 1), 2.0))
    assert torch.equal(gathered(wrapped.weight), torch.ones(SHAPE))
    assert torch.equal(gathered(through_a_view.weight), torch.full(SHAPE, 4.0))
    assert module.weight.ds_shape == SHAPE and module.weight.shape == (0, )
    state = {name: param.detach() for name, param in module.named_parameters()}
    assert pickle.loads(pickle.dumps(copy.deepcopy(state)))["weight"].shape == (0, )
    with deepspeed.zero.Init(config_dict_or_path=ds_config(1)):
        module = Experts(torch.nn.init.zeros_)
        with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=0):
            torch.nn.init.ones_(module.weight)
    assert torch.equal(gathered(module.weight), torch.ones(SHAPE))
    assert torch.empty is deepspeed.runtime.zero.partition_parameters._orig_torch_empty


def test_other_code(two_ranks):
    two_ranks.run(behaviours)


def test_construction_needs_a_shard(two_ranks, three_ranks_without):
    for seen in two_ranks.run(measure, 2, 1):
        assert seen["construct"] < LAYER_BYTES / 16
    for seen in three_ranks_without.run(measure, 2, 1):
        assert seen["construct"] > LAYER_BYTES / 2
