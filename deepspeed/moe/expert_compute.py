# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The experts of one rank as six grouped GEMMs, with kernels around them that touch every row as seldom as possible.

Kept between forward and backward are the tokens, which the model keeps anyway, and the up projection. Backward reads
the tokens again instead of keeping their rows, computes the activation again, and writes its gradient over the up
projection. The gradient of a routing weight is ``<grad @ down, hidden>``, which needs no output of an expert; so the
weight itself can be applied where the activation is, as SonicMoE does (arXiv:2512.14080).

T tokens, K experts per token, R = T * K rows, H hidden size, F expert intermediate size, E experts of this rank.
"""
import dataclasses
from typing import Callable, Optional, Tuple

import torch

from deepspeed.moe.expert_activations import Activation
from deepspeed.moe.expert_rows import Routing, bias_products, collect, sort_slots, spread
from deepspeed.moe.kernel_choice import row_kernels


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The parameters of this rank's experts, ``[E, out, in]``, or ``[E, in, out]`` when transposed.

    Attributes:
        up: the up projection ``[E, 2F, H]`` (``[E, F, H]`` without gate), or gate and up ``[E, F, H]`` each.
        down: ``[E, H, F]``.
        up_bias, down_bias: ``[E, 2F]`` and ``[E, H]``, or None.
        activation: an ``Activation``, or any function of the up projection that works row by row.
    """
    up: Tuple[torch.Tensor, ...]
    down: torch.Tensor
    activation: Callable
    up_bias: Optional[torch.Tensor] = None
    down_bias: Optional[torch.Tensor] = None
    is_transposed: bool = False


def compute_experts(weights, tokens_TH, indices_TK, weights_TK):
    """``out[t] = sum_k weights[t, k] * expert[indices[t, k]](tokens[t])``, without reading anything on the host.

    Args:
        weights: ``ExpertWeights`` of tensors of the tokens' dtype (bfloat16 is fast).
        tokens_TH: ``[T, H]``.
        indices_TK: integers; numbers outside ``[0, E)`` are no expert and add nothing. A number may repeat in a row.
        weights_TK: floating, or None for 1.

    Returns:
        Tensor: ``[T, H]`` of the tokens' dtype.
    """
    # The kernels read tensors by number of slot and of token.
    indices_TK, tokens_TH = indices_TK.contiguous(), tokens_TH.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    formula = dataclasses.replace(weights, up=(None, ) * len(weights.up), down=None, up_bias=None, down_bias=None)
    return _Experts.apply(formula, indices_TK, tokens_TH, weights_TK, weights.up_bias, weights.down_bias,
                          weights.down, *weights.up)  # yapf: disable


class _Experts(torch.autograd.Function):

    @staticmethod
    def forward(ctx, formula, indices_TK, tokens_TH, weights_TK, up_bias, down_bias, down, *ups):
        routing = sort_slots(indices_TK, down.shape[0])
        rows = spread(tokens_TH, routing)
        up_R = tuple(_grouped(rows, up, routing, formula.is_transposed) for up in ups)
        del rows
        hidden = _activate(formula.activation, up_R, up_bias, routing, indices_TK)
        out = _grouped(hidden, down, routing, formula.is_transposed)
        del hidden
        ctx.formula, ctx.count = formula, len(ups)
        # Parameters are saved as they are, not as views: a view would keep what ZeRO-3 gathered alive until backward.
        ctx.save_for_backward(indices_TK, tokens_TH, weights_TK, up_bias, down_bias, down, *ups, *up_R, *routing)
        return collect(out, routing, weights_TK, indices_TK=indices_TK, bias_EH=down_bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TH):
        indices_TK, tokens_TH, weights_TK, up_bias, down_bias, down, *rest = ctx.saved_tensors
        ups, up_R, routing = rest[:ctx.count], rest[ctx.count:2 * ctx.count], Routing(*rest[2 * ctx.count:])
        del rest
        # The graph ends here unless the caller keeps it: then this is the only use of what was saved.
        is_last_use = not torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.maybe_clear_saved_tensors()
        work = _Backward(ctx.formula, routing, indices_TK, tokens_TH, weights_TK, ups, down, ctx.needs_input_grad[2:])
        grad_weights, grad_up_bias, grad_down_bias = work.start(grad_TH, tuple(up_R), up_bias, down_bias, is_last_use)
        del up_R
        grad_tokens, grad_down, grad_ups = work.finish()
        return None, None, grad_tokens, grad_weights, grad_up_bias, grad_down_bias, grad_down, *grad_ups


class _Backward:
    """The gradients of ``_Experts``, made in the order in which memory peaks lowest."""

    def __init__(self, formula, routing, indices_TK, tokens_TH, weights_TK, ups, down, needs):
        self.formula, self.routing, self.indices_TK = formula, routing, indices_TK
        self.tokens_TH, self.weights_TK, self.ups, self.down = tokens_TH, weights_TK, ups, down
        (self.needs_tokens, self.needs_weights, self.needs_up_bias, self.needs_down_bias, self.needs_down,
         *self.needs_ups) = needs

    def start(self, grad_TH, up_R, up_bias, down_bias, in_place):
        """Back to the up projection's output; returns the gradients of the routing weights and of the biases."""
        routing, formula = self.routing, self.formula
        self.grad_rows = spread(grad_TH, routing)
        grad_hidden = _grouped(self.grad_rows, self.down, routing, not formula.is_transposed)
        self.grad_up_R, self.scaled, grad_weights = _activate_backward(formula.activation, up_R, up_bias, grad_hidden,
                                                                       self.weights_TK, routing, self.indices_TK,
                                                                       in_place)
        if self.needs_weights:
            if down_bias is not None:
                grad_weights += bias_products(grad_TH, down_bias, routing, self.indices_TK)
            grad_weights = grad_weights.to(self.weights_TK.dtype)
        return (grad_weights if self.needs_weights else None,
                _sums(self.grad_up_R[0], routing) if self.needs_up_bias else None,
                _sums(self.grad_rows, routing, self.weights_TK) if self.needs_down_bias else None)  # yapf: disable

    def finish(self):
        """The gradients of the tokens, of the down and of the up projections; None where nobody asks."""
        if self._down_first():
            grad_down = self._of_down()
            grad_tokens = self._of_tokens()
            return grad_tokens, grad_down, self._of_ups()
        grad_ups = self._of_ups()
        grad_tokens = self._of_tokens()
        del self.grad_up_R
        return grad_tokens, self._of_down(), grad_ups

    def _down_first(self):
        """Early, its operands are gone when the larger gradient is made; late, it is not there yet itself."""
        operands, result = self.grad_rows.numel() + self.scaled.numel(), self.down.numel()
        up_operands = sum(grad.numel() for grad in self.grad_up_R) + self.grad_rows.numel()
        return up_operands + result <= max(up_operands + operands, operands + result)

    def _of_down(self):
        rows, grad = self.scaled, self.grad_rows
        del self.scaled, self.grad_rows
        return _weight_gradient(rows, grad, self.routing, self.formula.is_transposed) if self.needs_down else None

    def _of_tokens(self):
        if not self.needs_tokens:
            return None
        inputs = [_grouped(grad, up, self.routing, not self.formula.is_transposed)
                  for grad, up in zip(self.grad_up_R, self.ups)]  # yapf: disable
        return collect(inputs[0], self.routing, more_RH=inputs[1] if len(inputs) == 2 else None)

    def _of_ups(self):
        if not any(self.needs_ups):
            return [None] * len(self.ups)
        rows = spread(self.tokens_TH, self.routing)
        return [_weight_gradient(rows, grad, self.routing, self.formula.is_transposed) for grad in self.grad_up_R]


def _grouped(rows_RI, weight, routing, transposed):
    """Every row times its expert's matrix, ``[E, in, out]`` when transposed. Rows of nobody are left undefined."""
    if rows_RI.shape[0] == 0:
        return rows_RI.new_empty(0, weight.shape[2 if transposed else 1])
    return torch._grouped_mm(rows_RI, weight if transposed else weight.transpose(-2, -1), offs=routing.offsets_E)


def _weight_gradient(rows_RI, grad_RO, routing, transposed):
    left, right = (rows_RI, grad_RO) if transposed else (grad_RO, rows_RI)
    if rows_RI.shape[0] == 0:
        return left.new_zeros(routing.offsets_E.numel(), left.shape[1], right.shape[1])
    return torch._grouped_mm(left.t(), right, offs=routing.offsets_E)


def _sums(rows_RN, routing, weights_TK=None):
    """``[E, N]``: sums over each expert's rows, by weight. A grouped GEMM of few columns, for its speed and order.

    A weight is the sum of two numbers of the rows' dtype, so that it loses nothing.
    """
    columns = rows_RN.new_zeros(rows_RN.shape[0], 8)  # 16 bytes are the least that a grouped GEMM takes
    if weights_TK is None:
        columns[:, 0] = 1
    else:
        weight_R = weights_TK.flatten()[routing.slots_R]
        columns[:, 0] = weight_R
        columns[:, 1] = weight_R - columns[:, 0]
    return _weight_gradient(columns, rows_RN, routing,
                            transposed=True)[:, :2].sum(1, dtype=torch.float32).to(rows_RN.dtype)


def _activate(activation, up_R, bias, routing, indices_TK):
    kernels = _kernels_for(activation, up_R)
    if kernels is not None:
        return kernels.activate(activation, up_R, bias, routing, indices_TK)
    return activation(*_biased(up_R, bias, routing, indices_TK))


def _activate_backward(activation, up_R, bias, grad_RF, weights_TK, routing, indices_TK, in_place):
    """See ``expert_kernels.activate_backward``; this is its plain expression, for any function."""
    kernels = _kernels_for(activation, up_R)
    if kernels is not None:
        return kernels.activate_backward(activation, up_R, bias, grad_RF, weights_TK, routing, indices_TK, in_place)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in up_R]
        hidden = activation(*_biased(inputs, bias, routing, indices_TK))
    if weights_TK is None:
        return torch.autograd.grad(hidden, inputs, grad_RF), hidden.detach(), None
    wide = torch.promote_types(grad_RF.dtype, torch.float32)
    weight_R = weights_TK.flatten()[routing.slots_R, None].to(wide)
    grads = torch.autograd.grad(hidden, inputs, (grad_RF * weight_R).to(hidden.dtype))
    hidden = hidden.detach()
    products_R = (grad_RF.to(wide) * hidden).sum(-1)
    grad_weights = products_R[routing.positions_TK.clamp(0)] if len(products_R) else products_R.view(weights_TK.shape)
    return grads, (hidden * weight_R).to(hidden.dtype), grad_weights.masked_fill(routing.positions_TK < 0, 0)


def _kernels_for(activation, up_R):
    return row_kernels(up_R[0]) if isinstance(activation, Activation) else None


def _biased(up_R, bias, routing, indices_TK):
    if bias is None:
        return up_R
    return [up_R[0] + bias[indices_TK.flatten()[routing.slots_R].clamp(0, bias.shape[0] - 1)]]
