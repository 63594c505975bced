# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the experts' forward over ranks sends, what the family's forward is given, and what comes back."""
import pytest
import torch

from ranks import rank_group

EXPERTS, TOPK, HIDDEN = 6, 3, 5
TOKENS = (7, 4)  # of each rank

two_ranks, four_ranks = rank_group(2), rank_group(4)


def routed(rank):
    """Tokens in bf16, experts of which some are nobody's, float32 weights."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS[rank], HIDDEN, generator=generator).bfloat16()
    experts = torch.randint(-1, EXPERTS + 2, (TOKENS[rank], TOPK), generator=generator)
    return tokens, experts, torch.rand(TOKENS[rank], TOPK, generator=generator)


def dispatched(ep):
    """Compute ``token * (1 + number of the expert)`` over ranks; returns what the experts got, and the result."""
    from unittest import mock

    import deepspeed.comm as dist
    from deepspeed.moe import expert_dispatch
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(ep)
    group = groups._get_expert_parallel_group(f"ep_size_{ep}")
    first = dist.get_rank(group=group) * (EXPERTS // ep)
    got, sent = [], []

    def experts_forward(rows, local, weights):
        got.append((rows.shape, local.flatten().tolist(), weights.unique().tolist(), weights.dtype))
        outputs = (rows.float()[:, None] * (1 + first + local)[..., None]).to(rows.dtype)
        return (outputs * weights[..., None]).sum(1).to(rows.dtype)

    def all_to_all(group, rows, *splits):
        sent.append(rows.shape)
        return real(group, rows, *splits)

    real = expert_dispatch._AllToAllV.apply
    with mock.patch.object(expert_dispatch._AllToAllV, "apply", all_to_all):
        compute = expert_dispatch.with_any_routing(experts_forward, EXPERTS // ep)
        result = expert_dispatch.dispatched_forward(compute, *routed(dist.get_rank()), EXPERTS, group)
    return got, sent, (result.dtype, result.is_contiguous(), result.float())


def expected(rank):
    tokens, experts, weights = routed(rank)
    valid = (experts >= 0) & (experts < EXPERTS)
    rows = (tokens.float()[:, None] * (1 + experts)[..., None]).bfloat16()  # an expert's output has the tokens' dtype
    return (rows * (weights * valid)[..., None]).sum(1).bfloat16().float()


@pytest.mark.parametrize("ep", [1, 2])
def test_rows_numbers_and_weights(two_ranks, ep):
    results = two_ranks.run(dispatched, ep)
    pairs = torch.cat([routed(rank)[1].flatten() for rank in (0, 1)])
    for rank, (got, sent, (dtype, contiguous, result)) in enumerate(results):
        assert (dtype, contiguous) == (torch.bfloat16, True)
        torch.testing.assert_close(result, expected(rank), rtol=1e-6, atol=1e-6)
        (shape, local, weights, _), = got
        assert set(local) <= set(range(EXPERTS // ep))  # a number of nobody's never gets here
        if ep == 2:
            mine = (pairs >= rank * 3) & (pairs < rank * 3 + 3)
            own = routed(rank)[1]
            assert shape == (int(mine.sum()), HIDDEN) and weights == [1.0]
            # Rows of existing experts and nothing else cross, each way once.
            assert sent == [(int(((own >= 0) & (own < EXPERTS)).sum()), HIDDEN), shape]


def bytes_sent(ep):
    """Bytes of every exchange of a forward and a backward, and the rows of this rank that go and that come."""
    from unittest import mock

    import deepspeed.comm as dist
    from deepspeed.moe import expert_dispatch
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(ep)
    group = groups._get_expert_parallel_group(f"ep_size_{ep}")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(9, HIDDEN, generator=generator).bfloat16().requires_grad_()
    experts = torch.randint(-1, 2 * ep + 1, (9, TOPK), generator=generator)
    weights = torch.rand(9, TOPK, generator=generator).requires_grad_()
    sent, came = [], []

    def all_to_all_single(output, tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return real(output, tensor, *args, **kwargs)

    def compute(rows, local, _):
        came.append(rows.shape[0])
        return rows * 2

    real = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", all_to_all_single):
        expert_dispatch.dispatched_forward(compute, tokens, experts, weights, 2 * ep, group).sum().backward()
    return sent, int(((experts >= 0) & (experts < 2 * ep)).sum()), came[0]


@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_on_the_wire(four_ranks, ep):
    """Numbers of rows once, every routed row once each way, and the same for gradients: no padding, no weights."""
    row = HIDDEN * 2
    for sent, go, come in four_ranks.run(bytes_sent, ep):
        assert sent == [2 * ep * 8, go * row, come * row, go * row, come * row]
