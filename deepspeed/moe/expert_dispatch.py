# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The experts' forward over ranks: rows go to the ranks that hold their experts and come back.

T tokens of this rank, K experts per token, H hidden size, E experts of all ranks, R rows received, in dimension order.
"""
import torch

import deepspeed.comm as dist
from deepspeed.module_inject.auto_ep_layer import _AllToAllV


@torch.compiler.disable
def dispatched_forward(compute, hidden_states, indices_TK, weights_TK, num_experts, group):
    """Compute experts that are spread over the ranks of ``group``, each of which holds an equal share in order.

    Args:
        compute: ``compute(rows_RH, expert_R1, weight_R1)``, the family's forward with this rank's experts, numbered
            from 0. It always gets at least one row, so that its parameters are part of the graph on every rank.
        hidden_states: tokens, ``[..., H]``.
        indices_TK: experts of each token; a number outside ``[0, E)`` is no expert and adds nothing.
        weights_TK: routing weights, of any floating dtype.

    Returns:
        Tensor: shape and dtype of ``hidden_states``, contiguous. Sums over K are in the promoted dtype.
    """
    tokens_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    indices_TK = indices_TK.reshape(-1, indices_TK.shape[-1])
    weights_TK = weights_TK.reshape(indices_TK.shape)
    foreign_TK = (indices_TK < 0) | (indices_TK >= num_experts)
    if dist.get_world_size(group=group) == 1:
        # A foreign number becomes expert 0 with weight 0: it never reaches the family's forward.
        combined_TH = _with_spare_row(compute, tokens_TH, indices_TK.masked_fill(foreign_TK, 0),
                                      weights_TK.masked_fill(foreign_TK, 0))  # yapf: disable
    else:
        combined_TH = _over_ranks(compute, tokens_TH, indices_TK.masked_fill(foreign_TK, num_experts), weights_TK,
                                  num_experts, group)  # yapf: disable
    return combined_TH.to(hidden_states.dtype).reshape(hidden_states.shape).contiguous()


def _with_spare_row(compute, tokens_TH, indices_TK, weights_TK):
    """``compute`` with a token of zeros added: it may get no token at all, and would then lose the graph."""
    spare = [tensor.new_zeros(1, tensor.shape[1]) for tensor in (tokens_TH, indices_TK, weights_TK)]
    padded = [torch.cat(pair) for pair in zip((tokens_TH, indices_TK, weights_TK), spare)]
    return compute(*padded)[:-1]


def _over_ranks(compute, tokens_TH, indices_TK, weights_TK, num_experts, group):
    (T, K), H = indices_TK.shape, tokens_TH.shape[1]
    experts_sorted, order = indices_TK.flatten().sort(stable=True)
    counts_E = _counts(experts_sorted, num_experts)
    received, sent_splits, received_splits = _exchange_counts(counts_E, group)
    order = order[:sum(sent_splits)]  # no expert is sorted to the end

    rows = _AllToAllV.apply(group, tokens_TH[order // K], sent_splits, received_splits)
    local_R = torch.arange(received.shape[1], device=rows.device).repeat(received.shape[0])
    local_R = local_R.repeat_interleave(received.flatten(), output_size=rows.shape[0])
    rows = _compute_rows(compute, rows, local_R)
    rows = _AllToAllV.apply(group, rows, received_splits, sent_splits)

    # Every row has its place, so that the sum over K has a fixed order.
    weighted = rows * weights_TK.flatten()[order, None]
    return weighted.new_zeros(T * K, H).index_copy(0, order, weighted).view(T, K, H).sum(dim=1)


def _counts(experts_sorted, num_experts):
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts_sorted.device)
    return counts.scatter_add_(0, experts_sorted, torch.ones_like(experts_sorted))[:num_experts]


def _exchange_counts(counts_E, group):
    """Rows received ``[rank, local expert]``, and as lists the rows sent to and received from every rank."""
    sent = counts_E.view(dist.get_world_size(group=group), -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    return received, *torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()


def _compute_rows(compute, rows_RH, local_R):
    if rows_RH.shape[0] == 0:
        return _with_spare_row(compute, rows_RH, local_R[:, None], rows_RH.new_ones(0, 1))
    return compute(rows_RH, local_R[:, None], rows_RH.new_ones(rows_RH.shape[0], 1))
