# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Plans, carried out by ranks inside one process, give every target element its value from the source, once."""
import tracemalloc
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspeed.moe.expert_layout import grouped_layout, module_list_layout
from deepspeed.moe.reshard import Box, boxes_of
from deepspeed.moe.reshard_exchange import _window
from expert_layouts import KINDS, layout_of, shard_of, targets_of
from reshard_plans import MODELS, degrees, grid, plan_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shards_of(placement, tensor, world):
    """Every rank's flat shard of ``tensor``, padded as ZeRO-3 pads."""
    length = int(np.diff(placement.bounds).max())
    return [shard_of(tensor, *placement.interval(rank), length) for rank in range(world)]


@st.composite
def cases(draw):
    world = draw(st.integers(1, 6))
    ep = draw(st.sampled_from([degree for degree in range(1, world + 1) if world % degree == 0]))
    sizes = dict(experts=ep * draw(st.integers(1, 4)), ffn=draw(st.integers(1, 5)), hidden=draw(st.integers(1, 6)))
    return (draw(st.sampled_from(KINDS)), sizes, world, grid(world, ep, draw(st.booleans())),
            draw(st.sampled_from(DTYPES)), draw(st.integers(1, 40)))  # yapf: disable


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_every_element_arrives_once_and_unchanged(case, seed):
    kind, sizes, world, ranks, dtype, quota = case
    layout = layout_of(kind, **sizes)
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in layout.sources.items()}
    plan = plan_of(layout, world, ranks)
    sources = {name: shards_of(plan._sources[name], whole[name], world) for name in whole}
    nowhere = {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.targets.items()}
    targets = {name: shards_of(plan._targets[name], tensor, world) for name, tensor in nowhere.items()}
    writes = {name: [torch.zeros_like(shard) for shard in shards] for name, shards in targets.items()}

    for rank in range(world):
        for peer, moves in plan.received(rank).items():
            assert plan.sent(peer)[rank] == moves
            for start in range(0, sum(move.numel for move in moves), quota):
                for move in _window(moves, start, start + quota):
                    name = move.section.target.tensor
                    source = move.source_view(sources[move.section.source.tensor][peer])
                    move.target_view(targets[name][rank]).copy_(source)
                    move.target_view(writes[name][rank]).add_(1)

    expected = targets_of(kind, whole)
    assert set(expected) == set(targets)
    for name, tensor in expected.items():
        wanted = shards_of(plan._targets[name], tensor.contiguous(), world)
        for rank in range(world):
            start, stop = plan._targets[name].interval(rank)
            assert torch.equal(targets[name][rank][:stop - start], wanted[rank][:stop - start]), (name, rank)
            assert torch.all(writes[name][rank][:stop - start] == 1)
            assert torch.all(writes[name][rank][stop - start:] == 0), "the padding was written to"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.permutations(range(3)), st.integers(1, 3),
       st.integers(-3, 70), st.integers(-3, 70))  # yapf: disable
def test_boxes_cover_a_flat_interval(shape, order, gap, start, stop):
    order = [axis for axis in order if axis < len(shape)]
    strides, step = [0] * len(shape), gap
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + gap - 1
    place = sum(np.indices(shape)[axis] * strides[axis] for axis in range(len(shape)))
    covered = np.zeros(shape, dtype=int)
    boxes = boxes_of(tuple(shape), tuple(strides), start, stop)
    for box in boxes:
        covered[tuple(slice(low, high) for low, high in zip(box.start, box.stop))] += 1
    assert np.array_equal(covered, ((start <= place) & (place < stop)).astype(int))
    assert len(boxes) <= 2 * len(shape) - 1


def apart(boxes):
    """Whether no two of the boxes, ``[n, axes, (start, stop)]``, have an element in common."""
    meet = np.ones((len(boxes), len(boxes)), dtype=bool)
    for axis in range(boxes.shape[1]):
        start, stop = boxes[:, axis, 0], boxes[:, axis, 1]
        meet &= np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop)
    return not np.triu(meet, 1).any()


@pytest.mark.parametrize("model, world, kind", [(model, world, "fused") for model in MODELS
                                                for world in (64, 256, 1024)] + [("DeepSeek-V3", 256, "transposed"),
                                                                                 ("Mixtral-8x22B", 64, "transposed")])
def test_counts_agree_at_scale(model, world, kind):
    experts, ffn, hidden = MODELS[model]
    layout = layout_of(kind, experts, ffn, hidden)
    layer = sum(prod(shape) for shape in layout.targets.values())
    for ep in degrees(experts, world):
        plan = plan_of(layout, world, grid(world, ep))
        received, sent = np.zeros((world, world), dtype=np.int64), np.zeros((world, world), dtype=np.int64)
        for rank in range(world):
            for peer, moves in plan.received(rank).items():
                received[rank, peer] = sum(move.numel for move in moves)
            for peer, moves in plan.sent(rank).items():
                sent[peer, rank] = sum(move.numel for move in moves)
        assert np.array_equal(received, sent)
        held = sum(np.diff(plan._targets[name].bounds) for name in layout.targets)
        assert np.array_equal(np.sort(received.sum(axis=1)), np.sort(held))
        assert received.sum() == layer
        for rank in (0, world // 2 + 1, world - 1):
            by_section = {}
            for moves in plan.received(rank).values():
                for move in moves:
                    by_section.setdefault(move.section, []).append(list(zip(*move.box)))
            assert all(apart(np.array(boxes)) for boxes in by_section.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_needs_little_memory_to_plan(model):
    experts, ffn, hidden = MODELS[model]
    for world in (64, 1024):
        tracemalloc.start()
        layout = layout_of("module_list", experts, ffn, hidden)
        plan = plan_of(layout, world, grid(world, degrees(experts, world)[-1]))
        assert plan.received(1) and plan.sent(1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"gate_up_proj \(4, 6, 8\) and down_proj \(4, 8, 4\)"):
        grouped_layout({"gate_up_proj": (4, 6, 8), "down_proj": (4, 8, 4)})
    with pytest.raises(ValueError, match=r"gate_up_proj \(4, 5, 8\)"):
        grouped_layout({"gate_up_proj": (4, 5, 8), "down_proj": (4, 8, 2)})
    shapes = {"0.gate": (4, 2), "1.gate": (4, 3), "0.down": (2, 4), "1.down": (2, 4), "0.up": (4, 2), "1.up": (4, 2)}
    with pytest.raises(ValueError, match=r"1\.gate: found shape \(4, 3\); expected \(4, 2\)"):
        module_list_layout(shapes, 2, gate="gate", down="down", up="up")


def test_a_moves_parts_carry_its_elements_in_order():
    move = plan_of(layout_of("transposed", 2, 3, 5), 1, [[0]]).received(0)[0][0]
    flat = torch.arange(60.)
    whole = move.source_view(flat).reshape(-1)
    for cut in range(1, move.numel):
        parts = move.part(0, cut) + move.part(cut, move.numel)
        assert torch.equal(torch.cat([part.source_view(flat).reshape(-1) for part in parts]), whole)
    assert Box((0, 1), (2, 3)).numel == 4
