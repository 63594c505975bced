# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What a computation is made of, found without contents, is what the same computation with contents gives."""
import pytest
import torch

from deepspeed.checkpoint.tensor_origins import Origins

SHAPES = {**{f"gate.{expert}": (6, 4) for expert in range(3)}, **{f"up.{expert}": (6, 4) for expert in range(3)},
          "fused": (3, 4, 12), "matrix": (8, 6), "scalar": ()}  # yapf: disable

CASES = {
    "itself": lambda t: t["fused"],
    "a scalar": lambda t: t["scalar"],
    "a view": lambda t: t["fused"][1, 1:3, 2::3],
    "an expert of a transposed tensor": lambda t: t["fused"].transpose(1, 2).contiguous()[1],
    "a list of matrices": lambda t: torch.stack([t[f"gate.{expert}"] for expert in range(3)]),
    "a list stacked elsewhere": lambda t: torch.stack([t[f"gate.{expert}"] for expert in range(3)], dim=1),
    "gate and up": lambda t: torch.cat([
        torch.stack([t[f"gate.{expert}"] for expert in range(3)]),
        torch.stack([t[f"up.{expert}"] for expert in range(3)])], dim=1),
    "one half of a join": lambda t: torch.cat([t["gate.0"], t["up.0"]])[6:],
    "joined, then transposed": lambda t: torch.stack([t["gate.0"], t["up.2"]]).transpose(1, 2).contiguous(),
    "joined, then reshaped": lambda t: torch.cat([t["gate.0"], t["up.1"]]).reshape(2, 2, 3, 4).transpose(1, 2).clone(),
    "interleaved": lambda t: t["matrix"].reshape(4, 2, 6).transpose(0, 1).reshape(8, 6).contiguous(),
    "interleaved and split": lambda t: t["matrix"].reshape(2, 4, 6).transpose(0, 1).reshape(8, 6).chunk(4)[1],
    "joined in a transposed copy": lambda t: torch.cat([t["gate.0"].T.contiguous(), t["up.0"].T], dim=0),
    "flat": lambda t: t["fused"].transpose(0, 2).flatten(),
}  # yapf: disable

# What is no box of elements, or no elements of the given tensors at all.
COMPUTED = {
    "arithmetic": lambda t: t["matrix"] * 2,
    "padded": lambda t: torch.cat([t["matrix"], torch.zeros_like(t["matrix"])]),
    "another dtype": lambda t: torch.cat([t["matrix"], t["matrix"].half()]),
    "written into": lambda t: _written(t),
    "across a join": lambda t: torch.cat([t["matrix"], t["matrix"]])[4:12],
    "repeated": lambda t: t["matrix"].T.contiguous().expand(2, 6, 8),
}


def _written(tensors):
    made = torch.empty(2, 8, 6, device=tensors["matrix"].device)
    made[1] = tensors["matrix"]
    return made


def _origin(compute):
    metas = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    origins = Origins(metas)
    with origins:
        made = compute(metas)
    return made.shape, origins.of(made)


def _contents():
    numbers = torch.arange(1000.)
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    parts = numbers[:sum(sizes)].split(sizes)
    return {name: part.clone().reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts)}


@pytest.mark.parametrize("case", CASES)
def test_elements_are_found(case):
    shape, origin = _origin(CASES[case])
    tensors = _contents()
    found = torch.full((shape.numel(), ), -1.)
    for section in origin.sections:
        source, target = section.source, section.target
        found.as_strided(section.shape, target.strides,
                         target.offset).copy_(tensors[source.tensor].as_strided(section.shape, source.strides,
                                                                                source.offset))
    torch.testing.assert_close(found.view(shape), CASES[case](tensors), rtol=0, atol=0)
    assert {section.source.tensor for section in origin.sections} <= set(origin.inputs)


@pytest.mark.parametrize("case", COMPUTED)
def test_what_is_computed_names_its_inputs(case):
    _, origin = _origin(COMPUTED[case])
    assert origin.sections is None
    assert origin.inputs == ("matrix", )


def test_inputs_are_not_those_of_what_is_gone():
    tensors = {name: torch.empty(3, device="meta") for name in "ab"}
    with Origins(tensors) as origins:
        for _ in range(20):
            tensors["a"].new_zeros(3)  # gone at once, so the next tensor may get its address
            assert origins.of(torch.cat([tensors["b"]])).inputs == ("b", )
