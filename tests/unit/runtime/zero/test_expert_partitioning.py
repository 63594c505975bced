# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Experts filled shard to shard hold the bits of those that they replace, whatever layout, dtype and sizes."""
import contextlib
import functools
import types
from unittest import mock

import deepspeed
import pytest
import torch

from engines import autoep_layers, ds_config
from expert_layouts import layout_of, targets_of
from ranks import rank_group

two_ranks, three_ranks, four_ranks = rank_group(2), rank_group(3), rank_group(4)

pytestmark = pytest.mark.floor

LAYERS = [(6, 7, 25), (12, 3, 10)]  # experts, intermediate and hidden size: layers of different shapes in one model
KINDS = {  # storage -> names of the block's `expert_parallel` keys
    "fused": dict(expert_w1="gate_up_proj", expert_w2="down_proj", expert_w3=None),
    "transposed": dict(expert_w1="gate_up_proj", expert_w2="down_proj", expert_w3=None),
    "separate": dict(expert_w1="gate", expert_w2="down", expert_w3="up"),
    "module_list": dict(expert_w1="gate", expert_w2="down", expert_w3="up"),
}


class Expert(torch.nn.Module):

    def __init__(self, ffn, hidden):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, ffn, bias=False)
        self.down = torch.nn.Linear(ffn, hidden, bias=False)
        self.up = torch.nn.Linear(hidden, ffn, bias=False)


class Experts(torch.nn.Module):

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(shape)))


class Block(torch.nn.Module):

    def __init__(self, kind, experts, ffn, hidden):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False)
        if kind == "module_list":
            self.experts = torch.nn.ModuleList(Expert(ffn, hidden) for _ in range(experts))
        else:
            self.experts = Experts(layout_of(kind, experts, ffn, hidden).sources)


class Model(torch.nn.Module):
    """MoE blocks and nothing else: what is tested is how they are replaced, they are never called."""

    def __init__(self, kind, layers=LAYERS):
        super().__init__()
        self.config = types.SimpleNamespace(model_type="toy", num_experts_per_tok=2)
        self.layers = torch.nn.ModuleList(Block(kind, *sizes) for sizes in layers)


def config_for(kind, ep, dtype):
    names = dict(moe_layer_pattern=r"layers\.\d+", router_pattern="gate", expert_pattern="experts", top_k=2)
    return ds_config(ep, dtype="bf16" if dtype is torch.bfloat16 else None,
                     block={**names, **KINDS[kind], "reshard_bucket_bytes": 512})  # yapf: disable


def fill_with_random_values(model):
    """Give every parameter random values, equal on all ranks, and return them whole by name."""
    values, generator = {}, torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            values[name] = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.data.copy_(values[name])
    return values


def expected_targets(kind, values, layer):
    """``w1``, ``w2``, ``w3`` of one block, made from its whole source weights by ordinary tensor operations."""
    prefix = f"layers.{layer}.experts."
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return targets_of(kind, {name.removesuffix(".weight"): value for name, value in own.items()})


def replace_and_compare(kind, ep, dtype, partitioned=True, frozen=False):
    """Initialize an engine for a toy model; return names of expert parameters that differ from their sources."""
    config = config_for(kind, ep, dtype)
    context = deepspeed.zero.Init(config_dict_or_path=config) if partitioned else contextlib.nullcontext()
    with context:
        model = Model(kind)
    if not partitioned:
        model = model.to(dtype)
    values = fill_with_random_values(model)
    if frozen:
        model.layers[0].experts.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=config)[0]
    wrong = []
    for index, layer in enumerate(autoep_layers(engine.module).values()):
        local = LAYERS[index][0] // ep
        for name, value in expected_targets(kind, values, index).items():
            param = getattr(layer.experts, name)
            with deepspeed.zero.GatheredParameters(param):
                same = torch.equal(param.data, value[layer.ep_rank * local:(layer.ep_rank + 1) * local])
            if not same or param.dtype != dtype or param.requires_grad == (frozen and index == 0):
                wrong.append(f"{index}.{name}")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(two_ranks, kind):
    assert two_ranks.run(replace_and_compare, kind, 1, torch.float32) == [[]] * 2
    assert two_ranks.run(replace_and_compare, kind, 2, torch.bfloat16) == [[]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks(three_ranks, kind):
    assert three_ranks.run(replace_and_compare, kind, 3, torch.float32, frozen=True) == [[]] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks(four_ranks, kind):
    assert four_ranks.run(replace_and_compare, kind, 2, torch.bfloat16, frozen=True) == [[]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_is_whole_on_every_rank(two_ranks, kind):
    assert two_ranks.run(replace_and_compare, kind, 2, torch.float32, partitioned=False) == [[]] * 2


def fail_on_one_rank(fault):
    """Replace the layers of a toy model with a fault on rank 1."""
    import deepspeed.comm as dist
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.runtime.zero.expert_partitioning import _NewExperts

    config = config_for("fused", 2, torch.float32)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model("fused")
    replace = AutoEP._replace_moe_layer_without_retarget

    def replace_with_another_shape(*args, **kwargs):
        model.layers[1].experts.down_proj.ds_shape = torch.Size((12, 11, 3))
        return replace(*args, **kwargs)

    injected = contextlib.nullcontext()
    if dist.get_rank() == 1:
        injected = mock.patch.object(_NewExperts, fault, side_effect=torch.OutOfMemoryError("no memory left")) \
            if fault != "shape" else mock.patch.object(AutoEP, "_replace_moe_layer_without_retarget",
                                                       replace_with_another_shape)  # yapf: disable
    with injected:
        deepspeed.initialize(model=model, config=config)


@pytest.mark.parametrize("fault, reported", [("partition", "OutOfMemoryError: no memory left"),
                                             ("fill", "OutOfMemoryError: no memory left"),
                                             ("shape", "ValueError: expert weights gate_up_proj (12, 6, 10)")])
def test_a_failure_on_one_rank_ends_all(two_ranks, fault, reported):
    for error in two_ranks.errors(fail_on_one_rank, fault):
        assert error.startswith(f"FailedOnRank: rank 1: {reported}")


def replace_shared_experts():
    """Whether each block of a model whose two blocks share their experts has the weights of those."""
    config = config_for("fused", 2, torch.float32)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model("fused", [LAYERS[0], LAYERS[0]])
    model.layers[1].experts = model.layers[0].experts
    values = fill_with_random_values(model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    expected = expected_targets("fused", values, 0)["w2"]
    same = []
    for layer in autoep_layers(engine.module).values():
        with deepspeed.zero.GatheredParameters(layer.experts.w2):
            same.append(torch.equal(layer.experts.w2.data, expected[3 * layer.ep_rank:3 * layer.ep_rank + 3]))
    engine.destroy()
    return same


def test_shared_experts_are_read_twice(two_ranks):
    assert two_ranks.run(replace_shared_experts) == [[True, True]] * 2


def initialize_a_model_on_meta():
    with torch.device("meta"):
        model = Model("fused")
    deepspeed.initialize(model=model, config=config_for("fused", 2, torch.float32))


def test_a_source_on_the_meta_device_is_refused(two_ranks):
    for error in two_ranks.errors(initialize_a_model_on_meta):
        assert "found parameter 'layers.0.gate.weight' on the meta device" in error and "zero.Init" in error


def optimized_by_the_caller(partitioned, as_list):
    """Initialize with the caller's optimizer, or its parameter groups, made from the parameters before replacement.

    Returns the parameters of each group by name with its weight decay; each group's lr after one step of the
    caller's scheduler; and the bytes of source experts that are still held, although the caller keeps every source.
    """
    config = config_for("fused", 2, torch.float32)
    with deepspeed.zero.Init(config_dict_or_path=config) if partitioned else contextlib.nullcontext():
        model = Model("fused")
    sources = [param for layer in model.layers for param in layer.experts.parameters()]
    groups = [dict(params=[layer.gate.weight for layer in model.layers], lr=0.5, weight_decay=0.0),
              dict(params=sources[:2], lr=0.25, weight_decay=0.1)]  # yapf: disable
    halving = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    if as_list:  # the experts of the second layer are left out
        arguments = dict(model_parameters=groups, lr_scheduler=halving)
    else:
        del config["optimizer"]
        client = torch.optim.AdamW(groups)
        arguments = dict(optimizer=client, lr_scheduler=halving(client))
    engine = deepspeed.initialize(model=model, config=config, **arguments)[0]
    names = {id(param): name for name, param in engine.module.named_parameters()}
    trained = [([names.get(id(param)) for param in group["params"]], group["weight_decay"])
               for group in engine.optimizer.trainable_param_groups]  # yapf: disable
    engine.lr_scheduler.step()
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    engine.destroy()
    held = [tensor for param in sources if hasattr(param, "ds_tensor") for tensor in (param.data, param.ds_tensor)]
    return trained, rates, sum(tensor.untyped_storage().nbytes() for tensor in held)


@pytest.mark.parametrize("partitioned", [True, False], ids=["zero.Init", "whole"])
@pytest.mark.parametrize("as_list", [True, False], ids=["groups", "optimizer"])
def test_the_callers_groups_survive(two_ranks, partitioned, as_list):
    routers = [f"layers.{layer}.router.gate.weight" for layer in range(2)]
    experts = [f"layers.0.experts.{name}" for name in ("w1", "w2", "w3")]
    for trained, rates, held in two_ranks.run(optimized_by_the_caller, partitioned, as_list):
        # DeepSpeed gives the experts of a list of groups a group of their own, and leaves an empty one behind.
        assert [(sorted(params), decay) for params, decay in trained if params] == [(routers, 0.0), (experts, 0.1)]
        assert rates == [0.25, 0.125] and held == 0
