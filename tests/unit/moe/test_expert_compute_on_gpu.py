# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of the experts' kernels: bf16 errors beside Transformers', no wait, CUDA graphs."""
import functools

import pytest
import torch

from deepspeed.moe.expert_activations import Activation
from deepspeed.moe.expert_compute import ExpertWeights, compute_experts
from deepspeed.moe.kernel_choice import why_no_grouped_gemm
from expert_loop import by_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or why_no_grouped_gemm() is not None,
                                reason="needs a GPU with fast grouped GEMMs")

E, H, F, K = 24, 272, 200, 4


def tensors(T, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(1)
    random = functools.partial(torch.randn, generator=generator, device="cuda")
    indices = torch.rand(T, E, generator=generator, device="cuda")[:, 3:].topk(K).indices + 3  # three are idle
    indices[:, 1] = indices[:, 0]
    values = (random(T, H), random(T, K).softmax(1), random(E, 2 * F, H) * H**-.5, random(E, H, F) * F**-.5)
    grad = random(T, H).to(dtype)
    return indices, [value.to(torch.float32 if i == 1 and dtype == torch.bfloat16 else dtype).requires_grad_()
                     for i, value in enumerate(values)], grad  # yapf: disable


def ours(indices, tokens, weights, up, down):
    return compute_experts(ExpertWeights((up, ), down, Activation("silu")), tokens, indices, weights)


def reference(indices, tokens, weights, up, down):
    return by_loop(ExpertWeights((up, ), down, Activation("silu")), tokens, indices, weights)


def theirs(indices, tokens, weights, up, down):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    with torch.device("meta"):
        module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=E, hidden_size=H, moe_intermediate_size=F,
                                                experts_implementation="grouped_mm"))  # yapf: disable
    for name, tensor in (("gate_up_proj", up), ("down_proj", down)):
        delattr(module, name)  # a parameter would have a gradient of its own
        setattr(module, name, tensor)
    return module(tokens, indices, weights)


def results(compute, T=700, dtype=torch.bfloat16):
    indices, leaves, grad = tensors(T, dtype)
    out = compute(indices, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_errors_are_no_larger_than_those_of_transformers():
    # Both start from what bf16 made of the random numbers.
    indices, leaves, grad = tensors(700)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = reference(indices, *wide)
    expected = [out.detach(), *torch.autograd.grad(out, wide, grad.double())]
    errors = [[float((found.double() - value).norm() / value.norm()) for found, value in zip(results(way), expected)]
              for way in (ours, theirs)]  # yapf: disable
    assert all(mine <= 1.02 * other for mine, other in zip(*errors)), errors


def test_the_host_reads_nothing():
    results(ours)  # what is compiled and looked up once may wait
    indices, leaves, grad = tensors(700)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(indices, *leaves).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.grad is not None for leaf in leaves)


def test_capture_in_a_graph():
    indices, leaves, grad = tensors(700)
    expected = results(ours)

    def step():
        out = ours(indices, *leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in captured:
        tensor.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, expected))


@pytest.mark.parametrize("T", [0, 1])
def test_hardly_any_tokens(T):
    found = results(ours, T)
    assert all(torch.isfinite(tensor).all() for tensor in found)
