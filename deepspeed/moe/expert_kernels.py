# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Triton kernels around the grouped GEMMs of experts: sorting slots, moving rows, activations.

A slot is one of the K choices of a token, numbered ``t * K + k``. Every kernel sums in float32 in an order that does
not depend on the schedule, so results are the same from run to run. The plain PyTorch expression of each is in
``deepspeed.moe.expert_rows`` and ``deepspeed.moe.expert_activations``.
"""
import torch
import triton
import triton.language as tl

# Sizes were chosen on an H200, where these kernels then move 3.7 to 4.2 TB/s (docs/performance.md).
_SLOTS = 128  # of one program that counts or places
_COLUMNS = 1024  # of one program


@triton.jit
def _experts_of(expert_ptr, slots, num_slots, num_experts):
    """Experts of slots, and which of them exist."""
    expert = tl.load(expert_ptr + slots, mask=slots < num_slots, other=-1)
    exists = (expert >= 0) & (expert < num_experts)
    return tl.where(exists, expert, num_experts).to(tl.int32), exists


@triton.jit
def _count_kernel(expert_ptr, counts_ptr, num_slots, num_experts, SLOTS: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    expert, _ = _experts_of(expert_ptr, block * SLOTS + tl.arange(0, SLOTS), num_slots, num_experts)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit
def _scan_kernel(counts_ptr, totals_ptr, num_blocks, BINS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """In place, from rows of an expert in each block to those in the blocks before it; and their total."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], dtype=tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        pointers = counts_ptr + blocks[:, None] * BINS + columns[None, :]
        mask = blocks[:, None] < num_blocks
        counts = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, tl.cumsum(counts, axis=0) - counts + before[None, :], mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(totals_ptr + columns, before)


@triton.jit
def _place_kernel(expert_ptr, before_ptr, totals_ptr, offsets_ptr, slots_ptr, positions_ptr, num_slots, num_experts,
                  SLOTS: tl.constexpr, BINS: tl.constexpr):  # yapf: disable
    block = tl.program_id(0)
    within = tl.arange(0, SLOTS)
    slots = block * SLOTS + within
    expert, exists = _experts_of(expert_ptr, slots, num_slots, num_experts)
    # Among the block's slots of the same expert; read again, because a register cannot be had along two axes.
    other, _ = _experts_of(expert_ptr, slots[None, :], num_slots, num_experts)
    earlier = (expert[:, None] == other) & (within[None, :] < within[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    first = tl.load(offsets_ptr + expert, mask=exists, other=0) - tl.load(totals_ptr + expert, mask=exists, other=0)
    position = first + tl.load(before_ptr + block * BINS + expert, mask=exists, other=0) + rank
    tl.store(positions_ptr + slots, tl.where(exists, position, -1), mask=slots < num_slots)
    tl.store(slots_ptr + position, slots, mask=exists)


def sort_slots(indices_TK, num_experts):
    """Slots in the order of their experts: ``slots_R, positions_TK, counts_E, offsets_E`` (int32), see ``Routing``."""
    indices_TK = indices_TK.contiguous()
    num_slots = indices_TK.numel()
    blocks = triton.cdiv(num_slots, _SLOTS)
    bins = max(triton.next_power_of_2(num_experts + 1), 128)
    new = dict(dtype=torch.int32, device=indices_TK.device)
    before, totals = torch.empty(blocks, bins, **new), torch.empty(bins, **new)
    # Rows of nobody get slot 0, so that what belongs to a row's slot can be looked up for all of them.
    slots, positions = torch.zeros(num_slots, **new), torch.empty(indices_TK.shape, **new)
    if num_slots == 0:
        return slots, positions, torch.zeros(num_experts, **new), torch.zeros(num_experts, **new)
    _count_kernel[(blocks, )](indices_TK, before, num_slots, num_experts, _SLOTS, bins)
    _scan_kernel[(bins // 32, )](before, totals, blocks, bins, BLOCKS=128, COLUMNS=32)
    counts = totals[:num_experts]
    offsets = counts.cumsum(0, dtype=torch.int32)
    _place_kernel[(blocks, )](indices_TK, before, totals, offsets, slots, positions, num_slots, num_experts, _SLOTS,
                              bins)  # yapf: disable
    return slots, positions, counts, offsets


@triton.jit
def _spread_kernel(tokens_ptr, positions_ptr, rows_ptr, H, K: tl.constexpr, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    values = tl.load(tokens_ptr + token * H + columns, mask=mask)
    for k in range(K):
        position = tl.load(positions_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + position * H + columns, values, mask=columns < tl.where(position >= 0, H, 0))


def spread(tokens_TH, positions_TK):
    """Rows ``[T * K, H]``: every token at its positions; a token is read once. Other rows are left as they were."""
    (T, H), K = tokens_TH.shape, positions_TK.shape[1]
    tokens_TH = tokens_TH.contiguous()
    rows = tokens_TH.new_empty(T * K, H)
    if rows.numel():
        block = min(triton.next_power_of_2(H), 2 * _COLUMNS)
        _spread_kernel[(T, triton.cdiv(H, block))](tokens_TH, positions_TK, rows, H, K, block, num_warps=4)
    return rows


@triton.jit
def _collect_kernel(rows_ptr, more_ptr, weights_ptr, positions_ptr, indices_ptr, bias_ptr, out_ptr, H,
                    K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_H: tl.constexpr, HAS_MORE: tl.constexpr,
                    HAS_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr):  # yapf: disable
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for start in range(0, K, CHOICES):
        choices = start + tl.arange(0, CHOICES)
        slots = token * K + choices
        position = tl.load(positions_ptr + slots, mask=choices < K, other=-1).to(tl.int64)
        exists = position >= 0
        mask = exists[:, None] & (columns[None, :] < H)
        offsets = position[:, None] * H + columns[None, :]
        values = tl.load(rows_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_MORE:
            values += tl.load(more_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(indices_ptr + slots, mask=exists, other=0)
            values += tl.load(bias_ptr + expert[:, None] * H + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            values *= tl.load(weights_ptr + slots, mask=exists, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(values, axis=0)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def collect(rows_RH, positions_TK, weights_TK=None, more_RH=None, indices_TK=None, bias_EH=None):
    """``out[t] = sum_k weights[t, k] * (rows + more + bias[expert])[positions[t, k]]``, in the dtype of the rows."""
    (T, K), H = positions_TK.shape, rows_RH.shape[1]
    out = rows_RH.new_empty(T, H)
    if out.numel():
        choices = min(triton.next_power_of_2(K), 4)
        block = min(triton.next_power_of_2(H), _COLUMNS)
        unused = rows_RH
        _collect_kernel[(T, triton.cdiv(H, block))](
            rows_RH.contiguous(), unused if more_RH is None else more_RH,
            unused if weights_TK is None else weights_TK.contiguous(), positions_TK,
            unused if indices_TK is None else indices_TK.contiguous(), unused if bias_EH is None else bias_EH,
            out, H, K, choices, block, more_RH is not None, weights_TK is not None, bias_EH is not None,
            num_warps=4)  # yapf: disable
    return out


@triton.jit
def _products_kernel(tokens_ptr, rows_ptr, row_ptr, positions_ptr, weights_ptr, scaled_ptr, products_ptr, H,
                     K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_SCALED: tl.constexpr):  # yapf: disable
    slot = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + slot).to(tl.int64)
    exists = position >= 0
    row = tl.load(row_ptr + slot, mask=exists, other=0).to(tl.int64)
    weight = 1.0
    if HAS_SCALED:
        weight = tl.load(weights_ptr + slot).to(tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        mask = columns < tl.where(exists, H, 0)
        token = tl.load(tokens_ptr + (slot // K) * H + columns, mask=mask, other=0.0).to(tl.float32)
        total += token * tl.load(rows_ptr + row * H + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_SCALED:
            scaled = (token * weight).to(scaled_ptr.dtype.element_ty)
            tl.store(scaled_ptr + position * H + columns, scaled, mask=mask)
    tl.store(products_ptr + slot, tl.sum(total, axis=0))


def row_products(tokens_TH, rows, positions_TK, row_TK, weights_TK=None, scaled_RH=None):
    """``<tokens[t], rows[row[t, k]]>``, float32, 0 for slots without position.

    With ``scaled_RH`` it is filled, too: ``weights[t, k] * tokens[t]`` at each position.
    """
    (T, K), H = positions_TK.shape, tokens_TH.shape[1]
    products = torch.empty(T, K, dtype=torch.float32, device=tokens_TH.device)
    if T * K:
        has_scaled = scaled_RH is not None
        _products_kernel[(T * K, )](
            tokens_TH.contiguous(), rows, row_TK.contiguous(), positions_TK,
            weights_TK.contiguous() if has_scaled else rows, scaled_RH if has_scaled else rows, products, H, K,
            min(triton.next_power_of_2(H), 2 * _COLUMNS), has_scaled, num_warps=4)  # yapf: disable
    return products


def collect_backward(grad_TH, rows_RH, positions_TK, weights_TK):
    """Gradients of ``collect(rows, positions, weights)``: of the rows, and of the weights in float32."""
    grad_rows = torch.empty_like(rows_RH)
    return grad_rows, row_products(grad_TH, rows_RH, positions_TK, positions_TK, weights_TK, grad_rows)


@triton.jit
def _activated(x, alpha, KIND: tl.constexpr):
    """An activation and its derivative at ``x``, float32."""
    if KIND == "silu":  # x * sigmoid(alpha * x)
        sigmoid = tl.sigmoid(alpha * x)
        return x * sigmoid, sigmoid + alpha * x * sigmoid * (1 - sigmoid)
    elif KIND == "gelu":
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = tl.sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
        return x * half, half + x * half * (1 - half) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif KIND == "relu":
        return tl.maximum(x, 0.0), (x > 0).to(tl.float32)
    else:
        tl.static_assert(KIND == "relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2 * positive


@triton.jit
def _gated(gate, up, alpha, limit, offset, KIND: tl.constexpr, HAS_UP: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """The hidden value and its derivatives by ``gate`` and ``up``; see ``Activation``."""
    inside = gate
    if HAS_LIMIT:
        inside = tl.minimum(gate, limit)
    value, slope = _activated(inside, alpha, KIND)
    if HAS_LIMIT:
        slope = tl.where(gate <= limit, slope, 0.0)
    if not HAS_UP:
        return value, slope, slope
    factor, by_up = up, value
    if HAS_LIMIT:
        factor = tl.minimum(tl.maximum(up, -limit), limit)
        by_up = tl.where(tl.abs(up) <= limit, value, 0.0)
    factor += offset
    return value * factor, slope * factor, by_up


@triton.jit
def _loaded(pointer, bias_ptr, rows, expert, columns, stride, mask, STEP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Elements of the up projection, whose rows, and whose bias's rows, are ``stride`` elements apart."""
    value = tl.load(pointer + rows[:, None] * stride + columns[None, :] * STEP, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        offsets = expert[:, None] * stride + columns[None, :] * STEP
        value += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _activate_kernel(gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, slots_ptr, indices_ptr, offsets_ptr,
                     num_experts, F, stride, alpha, limit, offset, KIND: tl.constexpr, HAS_UP: tl.constexpr,
                     HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
                     BLOCK_F: tl.constexpr):  # yapf: disable
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    first = tl.program_id(0) * ROWS
    if first >= num_rows:
        return
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (rows[:, None] < num_rows) & (columns[None, :] < F)
    expert = rows
    if HAS_BIAS:
        expert = tl.load(indices_ptr + tl.load(slots_ptr + rows, mask=rows < num_rows, other=0))
    gate = _loaded(gate_ptr, gate_bias_ptr, rows, expert, columns, stride, mask, STEP, HAS_BIAS)
    up = gate
    if HAS_UP:
        up = _loaded(up_ptr, up_bias_ptr, rows, expert, columns, stride, mask, STEP, HAS_BIAS)
    value, _, _ = _gated(gate, up, alpha, limit, offset, KIND, HAS_UP, HAS_LIMIT)
    tl.store(hidden_ptr + rows[:, None] * F + columns[None, :], value.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward_kernel(gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr,
                              scaled_ptr, grad_weights_ptr, weights_ptr, slots_ptr, indices_ptr, offsets_ptr,
                              num_experts, F, stride, alpha, limit, offset, KIND: tl.constexpr, HAS_UP: tl.constexpr,
                              HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
                              STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr):  # yapf: disable
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    first = tl.program_id(0) * ROWS
    if first >= num_rows:
        return
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
    expert = rows
    if HAS_BIAS:
        expert = tl.load(indices_ptr + slots)
    weight = tl.full([ROWS], 1.0, dtype=tl.float32)
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + slots).to(tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        columns = start + tl.arange(0, BLOCK_F)
        mask = (rows[:, None] < num_rows) & (columns[None, :] < F)
        gate = _loaded(gate_ptr, gate_bias_ptr, rows, expert, columns, stride, mask, STEP, HAS_BIAS)
        up = gate
        if HAS_UP:
            up = _loaded(up_ptr, up_bias_ptr, rows, expert, columns, stride, mask, STEP, HAS_BIAS)
        value, by_gate, by_up = _gated(gate, up, alpha, limit, offset, KIND, HAS_UP, HAS_LIMIT)
        inside = rows[:, None] * F + columns[None, :]
        grad = tl.load(grad_ptr + inside, mask=mask, other=0.0).to(tl.float32)
        value = value.to(scaled_ptr.dtype.element_ty).to(tl.float32)  # what the down projection multiplied
        total += tl.sum(grad * value, axis=1)
        tl.store(scaled_ptr + inside, (value * weight[:, None]).to(scaled_ptr.dtype.element_ty), mask=mask)
        grad *= weight[:, None]
        outside = rows[:, None] * stride + columns[None, :] * STEP
        tl.store(grad_gate_ptr + outside, (grad * by_gate).to(grad_gate_ptr.dtype.element_ty), mask=mask)
        if HAS_UP:
            tl.store(grad_up_ptr + outside, (grad * by_up).to(grad_up_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHTS:
        tl.store(grad_weights_ptr + slots, total, mask=rows < num_rows)


def _halves(activation, up_R):
    """Gate and up as tensors, views where one tensor holds both. Without up the kernels do not look at the second."""
    gate, up = up_R if len(up_R) == 2 else activation.halves(up_R[0])
    return gate, gate if up is None else up


def activate(activation, up_R, bias, routing, indices_TK):
    """``[R, F]``: ``activation`` of the up projection, a tensor ``[R, 2F]``, or two, or ``[R, F]``; plus its bias."""
    gate, up = _halves(activation, up_R)
    R, F = gate.shape
    hidden = gate.new_empty(R, F)
    gate_bias, up_bias = (gate, up) if bias is None else _halves(activation, (bias, ))
    if R:
        block = min(triton.next_power_of_2(F), _COLUMNS)
        rows = _COLUMNS // block
        _activate_kernel[(triton.cdiv(R, rows), triton.cdiv(F, block))](
            gate, up, gate_bias, up_bias, hidden, routing.slots_R, indices_TK, routing.offsets_E,
            routing.offsets_E.numel(), F, gate.stride(0), activation.alpha, activation.limit or 0.0,
            activation.offset, activation.kind, activation.has_up, activation.limit is not None, bias is not None,
            gate.stride(1), rows, block, num_warps=4)  # yapf: disable
    return hidden


def activate_backward(activation, up_R, bias, grad_RF, weights_TK, routing, indices_TK, in_place):
    """Gradients around the activation when row ``r`` is multiplied by ``w[r]`` after the down projection.

    Args:
        grad_RF: product of the output's gradient, without ``w``, and the down projection. It is overwritten.
        weights_TK: the ``w``; None for 1.
        in_place: whether the up projection may be overwritten by its gradient.

    Returns:
        tuple: gradients of ``up_R``; ``w * hidden`` ``[R, F]``, what the down projection's gradient is made of; the
        gradient of ``w`` ``[T, K]``, float32, 0 for slots without expert.
    """
    gate, up = _halves(activation, up_R)
    grads = up_R if in_place else tuple(torch.empty_like(tensor) for tensor in up_R)
    grad_gate, grad_up = _halves(activation, grads)
    R, F = grad_RF.shape
    gate_bias, up_bias = (gate, up) if bias is None else _halves(activation, (bias, ))
    grad_weights = None
    if weights_TK is not None:
        grad_weights = torch.zeros(weights_TK.shape, dtype=torch.float32, device=grad_RF.device)
    if R:
        # A program has whole rows, whose sums it takes; columns past the last one would be work for nothing.
        block = next((size for size in (_COLUMNS, 512, 256) if F % size == 0), 128)
        rows = _COLUMNS // block
        unused = grad_RF
        _activate_backward_kernel[(triton.cdiv(R, rows), )](
            gate, up, gate_bias, up_bias, grad_RF, grad_gate, grad_up, grad_RF,
            unused if grad_weights is None else grad_weights, unused if weights_TK is None else weights_TK,
            routing.slots_R, indices_TK, routing.offsets_E, routing.offsets_E.numel(), F, gate.stride(0),
            activation.alpha, activation.limit or 0.0, activation.offset, activation.kind, activation.has_up,
            activation.limit is not None, bias is not None, weights_TK is not None, gate.stride(1), rows,
            block, num_warps=4)  # yapf: disable
    return grads, grad_RF, grad_weights
