# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The exchange over real ranks: values, bytes on the network, and failures on one rank."""
import contextlib
from math import prod
from unittest import mock

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.comm.agreement import agree, failing_together
from deepspeed.moe.reshard import Plan, expert_placement, zero3_placement
from deepspeed.moe.reshard_exchange import _Rounds, exchange
from expert_layouts import KINDS, layout_of, shard_of, targets_of
from ranks import rank_group

two_ranks, three_ranks, four_ranks = rank_group(2), rank_group(3), rank_group(4)
GROUPS = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}

pytestmark = pytest.mark.floor


@pytest.fixture(params=[(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)], ids="N{0[0]}-EP{0[1]}".format)
def world_and_ep(request):
    return request.param


def setting(kind, sizes, ep, dtype):
    """Plan, whole target tensors and this rank's source and (empty) target shards, for random weights."""
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = layout_of(kind, **sizes)
    generator = torch.Generator().manual_seed(7)
    whole = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in layout.sources.items()}
    holders = [list(range(ep_rank, world, ep)) for ep_rank in range(ep)]
    held = {name: zero3_placement(prod(shape), world) for name, shape in layout.sources.items()}
    wanted = {name: expert_placement(prod(shape), holders) for name, shape in layout.targets.items()}
    sources = {
        name: shard_of(whole[name], *placement.interval(rank), -(-whole[name].numel() // world))
        for name, placement in held.items()
    }
    targets = {
        name: torch.full((-(-prod(layout.targets[name]) // world), ), float("nan"), dtype=dtype)
        for name in layout.targets
    }
    return Plan(layout, held, wanted), targets_of(kind, whole), wanted, sources, targets


def exchanged(kind, sizes, ep, dtype, bucket_bytes):
    """Exchange random weights; return whether this rank's shards are right, bit by bit, and its traffic."""
    plan, expected, wanted, sources, targets = setting(kind, sizes, ep, dtype)
    traffic = exchange(plan, sources, targets, dist.get_world_group(), bucket_bytes)
    right = True
    for name, tensor in expected.items():
        start, stop = wanted[name].interval(dist.get_rank())
        right &= torch.equal(targets[name][:stop - start], tensor.reshape(-1)[start:stop])
    return right, traffic._asdict()


def test_values_and_bytes(request, world_and_ep):
    world, ep = world_and_ep
    group = request.getfixturevalue(GROUPS[world])
    for number, kind in enumerate(KINDS):
        sizes = dict(experts=6 if 6 % ep == 0 else 4, ffn=3 + number % 2, hidden=5)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        layout = layout_of(kind, **sizes)
        layer_bytes = sum(prod(shape) for shape in layout.targets.values()) * dtype.itemsize
        padded = sum(-(-prod(shape) // world) for shape in layout.targets.values()) * dtype.itemsize
        seen = {}
        for bucket in (1, 64, 2**20):
            answers = group.run(exchanged, kind, sizes, ep, dtype, bucket)
            assert all(right for right, _ in answers), (kind, dtype, bucket)
            seen[bucket] = [traffic for _, traffic in answers]
            sent = sum(traffic["sent"] for traffic in seen[bucket])
            assert sent == sum(traffic["received"] for traffic in seen[bucket])
            assert sent <= layer_bytes, "some byte crossed the network twice"
            assert all(traffic["received"] <= padded for traffic in seen[bucket])
        if sent:
            assert seen[2**20][0]["rounds"] == 1 < seen[1][0]["rounds"]


def test_parameters_shorter_than_the_number_of_ranks(four_ranks):
    answers = four_ranks.run(exchanged, "biased", dict(experts=2, ffn=1, hidden=1), 2, torch.float32, 64)
    assert all(right for right, _ in answers)


def exchange_failing_on(failing_rank, where):
    """Exchange, with a fault on one rank."""
    plan, _, _, sources, targets = setting("fused", dict(experts=4, ffn=3, hidden=5), 2, torch.float32)
    fault = contextlib.nullcontext()
    if dist.get_rank() == failing_rank:
        if where == "dtype":
            sources = {name: shard.double() for name, shard in sources.items()}
        elif where == "short shard":
            sources = {name: shard[:1].clone() for name, shard in sources.items()}
        else:  # "__init__": while buffers are made; "_slots": between two collectives
            fault = mock.patch.object(_Rounds, where, side_effect=torch.OutOfMemoryError("no memory left"))
    with fault:
        exchange(plan, sources, targets, dist.get_world_group(), 64)


@pytest.mark.parametrize("where, reported", [("__init__", "no memory left"), ("_slots", "no memory left"),
                                             ("dtype", "one dtype"), ("short shard", "RuntimeError")])
@pytest.mark.parametrize("failing_rank", [0, 2])
def test_a_failure_on_one_rank_ends_all(four_ranks, failing_rank, where, reported):
    for error in four_ranks.errors(exchange_failing_on, failing_rank, where):
        assert error.startswith(f"FailedOnRank: rank {failing_rank}: ") and reported in error
    assert all(right for right, _ in four_ranks.run(exchanged, "fused", dict(experts=4, ffn=3, hidden=5), 2,
                                                    torch.float32, 64))  # yapf: disable


def agree_on(failing_ranks):
    """Numbers told by all ranks, where ``failing_ranks`` fail in a block that all are to leave together."""
    rank = dist.get_rank()
    with failing_together(dist.get_world_group()):
        if rank in failing_ranks:
            raise KeyError("it broke")
        return agree(dist.get_world_group(), numbers=(rank, rank**2)) if not failing_ranks else None


def test_ranks_agree(three_ranks):
    assert three_ranks.run(agree_on, []) == [[(0, 0), (1, 1), (2, 4)]] * 3
    assert three_ranks.errors(agree_on, [1]) == ["FailedOnRank: rank 1: KeyError: 'it broke'"] * 3
    assert three_ranks.errors(agree_on, [0, 1, 2]) == ["KeyError: 'it broke'"] * 3
