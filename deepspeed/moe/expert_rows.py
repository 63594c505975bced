# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tokens as rows in the order of their experts, and rows back as tokens.

T tokens, K experts per token, H hidden size, E experts, R = T * K rows. A slot is one choice of one token, numbered
``t * K + k``. Triton kernels do it on CUDA devices (``deepspeed.moe.expert_kernels``), PyTorch does elsewhere.
"""
from typing import NamedTuple

import torch

from deepspeed.moe.kernel_choice import row_kernels


class Routing(NamedTuple):
    """Where every slot's row is, rows being sorted by expert and within an expert by slot.

    Attributes:
        slots_R: slot of each row; any slot in rows past ``offsets_E[-1]``, which belong to nobody.
        positions_TK: row of each slot; -1 where the expert's number is outside ``[0, E)``.
        counts_E: rows of each expert.
        offsets_E: end of each expert's rows, int32.
    """
    slots_R: torch.Tensor
    positions_TK: torch.Tensor
    counts_E: torch.Tensor
    offsets_E: torch.Tensor


def sort_slots(indices_TK, num_experts):
    """The ``Routing`` of ``indices_TK``; nothing is read on the host."""
    kernels = row_kernels(indices_TK)
    if kernels is not None:
        return Routing(*kernels.sort_slots(indices_TK, num_experts))
    exists_TK = (indices_TK >= 0) & (indices_TK < num_experts)
    experts, slots = indices_TK.where(exists_TK, num_experts).flatten().sort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add_(0, experts, torch.ones_like(experts))[:num_experts]
    positions = torch.empty_like(slots).scatter_(0, slots, torch.arange(slots.numel(), device=slots.device))
    return Routing(slots, positions.view(indices_TK.shape).where(exists_TK, -1), counts,
                   counts.cumsum(0, dtype=torch.int32))  # yapf: disable


def spread(tokens_TH, routing):
    """``[R, H]``: each slot's token at its row."""
    kernels = row_kernels(tokens_TH)
    if kernels is not None:
        return kernels.spread(tokens_TH, routing.positions_TK)
    return tokens_TH[routing.slots_R // max(routing.positions_TK.shape[1], 1)]


def collect(rows_RH, routing, weights_TK=None, more_RH=None, indices_TK=None, bias_EH=None):
    """``out[t] = sum_k weights[t, k] * (rows + more + bias[expert])[positions[t, k]]``, in float32 or wider, by k."""
    kernels = row_kernels(rows_RH)
    if kernels is not None:
        return kernels.collect(rows_RH, routing.positions_TK, weights_TK, more_RH, indices_TK, bias_EH)
    placed_TKH = _placed(rows_RH if more_RH is None else rows_RH + more_RH, routing)
    if bias_EH is not None:
        placed_TKH = placed_TKH + _of_experts(bias_EH, routing, indices_TK)
    if weights_TK is not None:
        placed_TKH = placed_TKH * weights_TK[..., None]
    return placed_TKH.sum(1).to(rows_RH.dtype)


def bias_products(tokens_TH, bias_EH, routing, indices_TK):
    """``[T, K]``: ``<tokens[t], bias[expert]>``, in float32 or wider."""
    kernels = row_kernels(tokens_TH)
    if kernels is not None:
        return kernels.row_products(tokens_TH, bias_EH, routing.positions_TK, indices_TK)
    return (_of_experts(bias_EH, routing, indices_TK) * tokens_TH[:, None]).sum(-1)


def _placed(rows_RH, routing):
    """``[T, K, H]``: the row of each slot, zeros where it has none, in float32 or wider."""
    missing_TK1 = routing.positions_TK[..., None] < 0
    if rows_RH.shape[0] == 0:
        rows_RH = rows_RH.new_zeros(1, rows_RH.shape[1])
    placed_TKH = rows_RH[routing.positions_TK.clamp(0)].masked_fill(missing_TK1, 0)
    return placed_TKH.to(torch.promote_types(rows_RH.dtype, torch.float32))


def _of_experts(bias_EH, routing, indices_TK):
    missing_TK1 = routing.positions_TK[..., None] < 0
    return bias_EH[indices_TK.masked_fill(missing_TK1[..., 0], 0)].masked_fill(missing_TK1, 0)


class Spread(torch.autograd.Function):
    """``spread`` for the rows that exist: ``apply(tokens_TH, routing, count)``.

    ``count`` is called for their number when the rows are under way, so that it may wait for the device.
    """

    @staticmethod
    def forward(ctx, tokens_TH, routing, count):
        ctx.routing = routing
        return spread(tokens_TH, routing)[:count()]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RH):
        return collect(grad_RH, ctx.routing), None, None


class Collect(torch.autograd.Function):
    """``collect`` with weights: ``apply(rows_RH, routing, weights_TK)``."""

    @staticmethod
    def forward(ctx, rows_RH, routing, weights_TK):
        ctx.routing = routing
        ctx.save_for_backward(rows_RH, weights_TK)
        return collect(rows_RH, routing, weights_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TH):
        rows_RH, weights_TK = ctx.saved_tensors
        kernels = row_kernels(grad_TH)
        if kernels is not None:
            grad_rows, products = kernels.collect_backward(grad_TH, rows_RH, ctx.routing.positions_TK, weights_TK)
        else:
            slots_R = ctx.routing.slots_R[:rows_RH.shape[0]]
            grad_rows = spread(grad_TH, ctx.routing)[:rows_RH.shape[0]] * weights_TK.flatten()[slots_R, None]
            products = (_placed(rows_RH, ctx.routing) * grad_TH[:, None]).sum(-1)
        return grad_rows.to(rows_RH.dtype), None, products.to(weights_TK.dtype)
