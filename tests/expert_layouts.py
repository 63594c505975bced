# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Every kind of expert tensors, each with its layout and with what plain tensor operations make of it."""
from deepspeed.moe.expert_layout import grouped_layout, identity_layout, module_list_layout, separate_layout

EXPERTS_INTERFACE = {
    "fused": {},
    "transposed": dict(is_transposed=True),
    "interleaved": dict(is_concatenated=False),
    "biased": dict(has_bias=True),
    "ungated": dict(has_gate=False),
    "transposed_interleaved_biased": dict(is_transposed=True, is_concatenated=False, has_bias=True),
    "ungated_transposed_biased": dict(has_gate=False, is_transposed=True, has_bias=True),
}
KINDS = [*EXPERTS_INTERFACE, "separate", "module_list", "module_list_fused", "identity"]


def _swapped(shape, swap):
    return (*shape[:-2], shape[-1], shape[-2]) if swap else shape


def _interface_shapes(experts, ffn, hidden, is_transposed=False, has_gate=True, has_bias=False, **_):
    rows, name = (2 * ffn, "gate_up_proj") if has_gate else (ffn, "up_proj")
    shapes = {
        name: _swapped((experts, rows, hidden), is_transposed),
        "down_proj": _swapped((experts, hidden, ffn), is_transposed)
    }
    if has_bias:
        shapes.update({f"{name}_bias": (experts, rows), "down_proj_bias": (experts, hidden)})
    return shapes


def layout_of(kind, experts, ffn, hidden):
    """The layout of one kind of ``experts`` experts with ``ffn`` intermediate and ``hidden`` model dimensions."""
    if kind in EXPERTS_INTERFACE:
        flags = EXPERTS_INTERFACE[kind]
        return grouped_layout(_interface_shapes(experts, ffn, hidden, **flags), **flags)
    if kind == "identity":
        return identity_layout(_interface_shapes(experts, ffn, hidden, has_bias=True))
    if kind == "separate":
        shapes = {"gate": (experts, ffn, hidden), "down": (experts, hidden, ffn), "up": (experts, ffn, hidden)}
        return separate_layout(shapes, "gate", "down", "up")
    columns = {"gate": (ffn, hidden), "down": (hidden, ffn), "up": (ffn, hidden)}
    if kind == "module_list_fused":
        columns = {"gate": (2 * ffn, hidden), "down": (hidden, ffn)}
    shapes = {f"{expert}.{name}": shape for expert in range(experts) for name, shape in columns.items()}
    return module_list_layout(shapes, experts, gate="gate", down="down", up="up" if "up" in columns else None)


def targets_of(kind, sources):
    """Target tensors made from whole source tensors with ordinary tensor operations, the reference of every test."""
    import torch

    if kind == "identity":
        return sources
    if kind == "separate":
        return {"w1": sources["gate"], "w2": sources["down"], "w3": sources["up"]}
    if kind.startswith("module_list"):
        count = sum(name.endswith(".down") for name in sources)
        stacked = {
            name: torch.stack([sources[f"{expert}.{name}"] for expert in range(count)])
            for name in ("gate", "down", "up") if f"0.{name}" in sources
        }
        gate, up = (stacked["gate"], stacked["up"]) if "up" in stacked else stacked["gate"].chunk(2, dim=1)
        return {"w1": gate, "w2": stacked["down"], "w3": up}
    flags, targets = EXPERTS_INTERFACE[kind], {}
    for name, tensor in sources.items():
        suffix = "_bias" if name.endswith("_bias") else ""
        if flags.get("is_transposed") and not suffix:
            tensor = tensor.transpose(1, 2)
        if name.startswith("down"):
            targets["w2" + suffix] = tensor
        elif name.startswith("up"):
            targets["w1" + suffix] = tensor
        elif flags.get("is_concatenated", True):
            targets["w1" + suffix], targets["w3" + suffix] = tensor.chunk(2, dim=1)
        else:
            targets["w1" + suffix], targets["w3" + suffix] = tensor[:, 0::2], tensor[:, 1::2]
    return targets


def shard_of(tensor, start, stop, length):
    """Elements ``[start, stop)`` of ``tensor`` in a flat shard of ``length`` elements, padded with NaN."""
    import torch

    shard = torch.full((length, ), float("nan"), dtype=tensor.dtype)
    shard[:stop - start] = tensor.reshape(-1)[start:stop]
    return shard
