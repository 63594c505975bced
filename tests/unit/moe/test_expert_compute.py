# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Experts as grouped GEMMs equal a loop over experts in float64: by kernels, interpreted, and in plain PyTorch."""
import pytest
import torch

from expert_loop import by_loop
from ranks import rank_group

BOUND = 2e-6  # relative, in norm; the loop's own float32 error is up to 3e-7

kernels = rank_group(1, TRITON_INTERPRET="1")
plain = rank_group(1)

# Sizes that divide by the 8 elements a grouped GEMM needs, and by nothing larger.
SIZES = dict(E=5, H=24, F=40, T=13, K=3)
CASES = {
    "one choice": dict(K=1),
    "every expert is chosen": dict(K=5, routing="all"),
    "all on one expert, again and again": dict(routing="one"),
    "experts and choices that do not exist": dict(routing="foreign"),
    "no choice exists": dict(routing="nobody"),
    "no tokens": dict(T=0),
    "one expert": dict(E=1, routing="one"),
    "512 experts": dict(E=512, H=8, F=8, T=200, K=8),
    "more slots than one program takes": dict(T=300, H=8, F=8, routing="foreign"),
    "weights of 1": dict(weighted=False),
    "gate and up apart": dict(separate=True),
    "without gate": dict(activation=dict(kind="relu2", has_up=False)),
    "gelu, transposed": dict(activation=dict(kind="gelu"), transposed=True),
    "tanh gelu": dict(activation=dict(kind="gelu_tanh")),
    "relu, biases": dict(activation=dict(kind="relu", has_up=False), bias=True),
    "clamped": dict(activation=dict(kind="silu", limit=0.5)),
    "GPT-OSS": dict(activation=dict(kind="silu", is_interleaved=True, alpha=1.702, limit=0.5, offset=1.0), bias=True,
                    transposed=True),
    "a function of the family's own": dict(activation=None, bias=True),
}  # yapf: disable


def _own(up):
    gate, up = up.chunk(2, dim=-1)
    return gate.sin() * up


def _indices(routing, E, T, K, generator):
    if routing == "all":
        return torch.stack([torch.randperm(E, generator=generator) for _ in range(T)])
    low, high = {"one": (E - 1, E), "foreign": (-1, E + 1), "nobody": (E, E + 1), "random": (0, E)}[routing]
    return torch.randint(low, high, (T, K), generator=generator)


def results(case, dtype, compute, frozen=(), twice=False):
    """Output and gradients, by name, of ``compute`` on random tensors that are the same for every call."""
    from deepspeed.moe.expert_activations import Activation
    from deepspeed.moe.expert_compute import ExpertWeights

    options = {**SIZES, "routing": "random", "weighted": True, "separate": False, "transposed": False, "bias": False,
               "activation": dict(kind="silu"), **case}  # yapf: disable
    E, H, F, T, K = (options[name] for name in "EHFTK")
    activation = _own if options["activation"] is None else Activation(**options["activation"])
    width = F if options["separate"] or not getattr(activation, "has_up", True) else 2 * F
    generator = torch.Generator().manual_seed(0)
    indices = _indices(options["routing"], E, T, K, generator)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    tensors = {"tokens": random(T, H), "down": random(E, H, F), "up": random(E, width, H)}
    if options["separate"]:
        tensors["up2"] = random(E, width, H)
    if options["transposed"]:
        tensors.update({name: tensors[name].transpose(1, 2).contiguous() for name in ("up", "down")})
    if options["bias"]:
        tensors.update(up_bias=random(E, width), down_bias=random(E, H))
    if options["weighted"]:
        tensors["scores"] = random(T, K)
    grad = random(T, H).to(dtype)
    leaves = {name: tensor.to(dtype).requires_grad_(name not in frozen) for name, tensor in tensors.items()}
    ups = tuple(leaves[name] for name in ("up", "up2") if name in leaves)
    weights = ExpertWeights(ups, leaves["down"], activation, leaves.get("up_bias"), leaves.get("down_bias"),
                            options["transposed"])  # yapf: disable
    out = compute(weights, leaves["tokens"], indices, leaves.get("scores"))
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = [torch.autograd.grad(out, list(asked.values()), grad, retain_graph=twice and step == 0)
                 for step in range(1 + twice)]  # yapf: disable
    assert all(torch.equal(*pair) for pair in zip(gradients[0], gradients[-1]))
    return {"out": out.detach(), **dict(zip(asked, gradients[0]))}


def compare(case, with_kernels, **options):
    """Relative errors in norm; runs twice, which must agree to the last bit."""
    from deepspeed.moe import kernel_choice
    from deepspeed.moe.expert_compute import compute_experts

    assert (kernel_choice.row_kernels(torch.zeros(1)) is not None) == with_kernels
    found, again = (results(case, torch.float32, compute_experts, **options) for _ in range(2))
    assert all(torch.equal(found[name], again[name]) for name in found)
    expected = results(case, torch.float64, by_loop, **options)
    assert found.keys() == expected.keys()
    return {name: float((found[name] - value).norm() / value.norm().clamp(1e-9)) for name, value in expected.items()}


def check(group, case, **options):
    errors, = group.run(compare, case, **options)
    assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels(kernels, case):
    check(kernels, case, with_kernels=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plain_expression(plain, case):
    check(plain, case, with_kernels=False)


@pytest.mark.parametrize("frozen", [("up", "down"), ("tokens", ), ("scores", "down"), ("up", )], ids="+".join)
def test_what_is_frozen_gets_no_gradient(kernels, frozen):
    check(kernels, {}, with_kernels=True, frozen=frozen)


@pytest.mark.parametrize("case", ["GPT-OSS", "gate and up apart"])
def test_a_graph_that_is_kept_is_good_for_a_second_backward(kernels, case):
    """The gradient may be written over what forward saved, but only in the last backward."""
    check(kernels, CASES[case], with_kernels=True, twice=True)


def with_views(weights, tokens, indices, scores):
    """``compute_experts`` of tensors with the same numbers that are not contiguous."""
    from deepspeed.moe.expert_compute import compute_experts

    return compute_experts(weights, *(tensor.T.contiguous().T for tensor in (tokens, indices, scores)))


def compare_views(case):
    from deepspeed.moe.expert_compute import compute_experts

    found, expected = (results(case, torch.float32, compute) for compute in (with_views, compute_experts))
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("case", ["one choice", "GPT-OSS"])
def test_tensors_that_are_not_contiguous(kernels, case):
    assert kernels.run(compare_views, CASES[case]) == [[]]


def saved_bytes(case):
    """Bytes that autograd keeps, without parameters, tokens and the routing's integers."""
    from deepspeed.moe.expert_compute import compute_experts

    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes if tensor.is_floating_point() and not tensor.requires_grad else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results(case, torch.float32, compute_experts)
    return sum(kept.values())


def test_forward_keeps_the_up_projection_alone(kernels):
    E, H, F, T, K = SIZES.values()
    assert kernels.run(saved_bytes, {}) == [T * K * 2 * F * 4]
