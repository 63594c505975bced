# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The reference that the experts' grouped GEMMs are compared with."""
import torch


def by_loop(weights, tokens, indices, scores):
    """What ``compute_experts`` computes, expert by expert, in the dtype of what it is given."""
    out = torch.zeros_like(tokens)
    turn = (lambda matrix: matrix) if weights.is_transposed else (lambda matrix: matrix.T)
    for expert in range(weights.down.shape[0]):
        token, choice = torch.where(indices == expert)
        ups = [tokens[token] @ turn(up[expert]) for up in weights.up]
        ups[0] = ups[0] + (0 if weights.up_bias is None else weights.up_bias[expert])
        rows = weights.activation(*ups) @ turn(weights.down[expert])
        rows = rows + (0 if weights.down_bias is None else weights.down_bias[expert])
        out = out.index_add(0, token, rows if scores is None else rows * scores[token, choice, None])
    return out
