# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The experts' forward over ranks: rows go to the ranks that hold their experts and come back.

T tokens of this rank, K experts per token, H hidden size, E experts of all ranks, R rows received, in dimension order.
"""
import torch

import deepspeed.comm as dist
from deepspeed.module_inject.auto_ep_layer import _AllToAllV
from deepspeed.moe.expert_rows import Collect, Spread, sort_slots


@torch.compiler.disable
def dispatched_forward(compute, hidden_states, indices_TK, weights_TK, num_experts, group):
    """Compute experts that are spread over the ranks of ``group``, each of which holds an equal share in order.

    Args:
        compute: ``compute(rows_RH, indices_RK, weights_RK)`` with this rank's experts, numbered from 0. It takes any
            number of rows, none as well; numbers of no expert, which add nothing; and None for weights of 1. Its
            parameters are part of the graph in any case.
        hidden_states: tokens, ``[..., H]``.
        indices_TK: experts of each token; a number outside ``[0, E)`` is no expert and adds nothing.
        weights_TK: routing weights, of any floating dtype.

    Returns:
        Tensor: shape and dtype of ``hidden_states``, contiguous. Sums over K are in float32 or wider.
    """
    tokens_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    indices_TK = indices_TK.reshape(-1, indices_TK.shape[-1])
    weights_TK = weights_TK.reshape(indices_TK.shape)
    if dist.get_world_size(group=group) == 1:
        combined_TH = compute(tokens_TH, indices_TK, weights_TK)
    else:
        combined_TH = _over_ranks(compute, tokens_TH, indices_TK, weights_TK, num_experts, group)
    return combined_TH.to(hidden_states.dtype).reshape(hidden_states.shape).contiguous()


def with_any_routing(forward, num_experts):
    """Make a ``compute`` of a family's forward, which knows neither foreign numbers nor the absence of tokens."""

    def compute(tokens_TH, indices_TK, weights_TK):
        if weights_TK is None:
            weights_TK = tokens_TH.new_ones(indices_TK.shape)
        # A foreign number becomes expert 0 with weight 0.
        foreign_TK = (indices_TK < 0) | (indices_TK >= num_experts)
        routed = tokens_TH, indices_TK.masked_fill(foreign_TK, 0), weights_TK.masked_fill(foreign_TK, 0)
        if tokens_TH.shape[0] > 0:
            return forward(*routed)
        # A token of zeros, or the parameters would be missing in the graph; joined to the tokens, or those would be.
        return forward(*(torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])]) for tensor in routed))[:0]

    return compute


def _over_ranks(compute, tokens_TH, indices_TK, weights_TK, num_experts, group):
    routing = sort_slots(indices_TK, num_experts)
    splits = _Splits(routing.counts_E, group)
    rows = Spread.apply(tokens_TH, routing, splits.count_sent)  # under way while the host waits for the numbers
    rows = _AllToAllV.apply(group, rows, splits.sent, splits.received)
    rows = compute(rows, splits.local_experts(rows.shape[0])[:, None], None)
    rows = _AllToAllV.apply(group, rows, splits.received, splits.sent)
    return Collect.apply(rows, routing, weights_TK)


class _Splits:
    """Rows sent to and received from every rank, as lists once ``count_sent`` was called: the one wait of the host."""

    def __init__(self, counts_E, group):
        sent = counts_E.view(dist.get_world_size(group=group), -1)
        self._by_rank = torch.empty_like(sent)  # [rank, local expert], received
        dist.all_to_all_single(self._by_rank, sent.contiguous(), group=group)
        self._host = torch.stack((sent.sum(dim=1), self._by_rank.sum(dim=1))).to("cpu", non_blocking=True)
        self._arrived = None
        if sent.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def count_sent(self):
        if self._arrived is not None:
            self._arrived.synchronize()
        self.sent, self.received = self._host.tolist()
        return sum(self.sent)

    def local_experts(self, num_rows):
        """``[R]``: which of this rank's experts each received row is for."""
        ranks, experts = self._by_rank.shape
        local = torch.arange(experts, device=self._by_rank.device).repeat(ranks)
        return local.repeat_interleave(self._by_rank.flatten(), output_size=num_rows)
