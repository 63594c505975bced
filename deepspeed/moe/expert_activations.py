# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What stands between an expert's two projections: the formula that a kernel knows, or the family's own function.

A family's formula is recognised by what its function computes, not by its name or code.
"""
import dataclasses
import itertools
from typing import Callable, Optional

import torch
import torch.nn.functional as F

# The first is x * sigmoid(alpha * x).
_FUNCTIONS = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: F.gelu(x),
    "gelu_tanh": lambda x, alpha: F.gelu(x, approximate="tanh"),
    "relu": lambda x, alpha: F.relu(x),
    "relu2": lambda x, alpha: F.relu(x).square(),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """``kind(min(gate, limit)) * (clamp(up, -limit, limit) + offset)``, or ``kind(up)`` without gate.

    Attributes:
        kind: one of silu, gelu, gelu_tanh, relu, relu2.
        has_up: whether there is a product; without one the only projection is called gate here.
        is_interleaved: whether gate and up alternate (``[g0, u0, g1, u1, ...]``) rather than follow each other.
        alpha: of silu.
        limit: None for no clamping.
        offset: 1.0 in GPT-OSS.
    """
    kind: str
    has_up: bool = True
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: Optional[float] = None
    offset: float = 0.0

    def __call__(self, *up_R):
        """``[..., F]`` of a projection ``[..., 2F]``, of ``[..., F]`` without gate, or of gate and up."""
        gate, up = up_R if len(up_R) == 2 else self.halves(up_R[0])
        value = _FUNCTIONS[self.kind](gate if self.limit is None else gate.clamp(max=self.limit), self.alpha)
        if up is None:
            return value
        return value * ((up if self.limit is None else up.clamp(-self.limit, self.limit)) + self.offset)

    def halves(self, whole):
        """Views of gate and up in one tensor; without gate, the tensor and None."""
        if not self.has_up:
            return whole, None
        return (whole[..., ::2], whole[..., 1::2]) if self.is_interleaved else whole.chunk(2, dim=-1)


def recognised(function: Callable, has_up: bool, constants) -> Optional[Activation]:
    """The ``Activation`` that ``function`` computes, or None.

    Args:
        function: of a projection ``[rows, 2F]`` or, without gate, ``[rows, F]``.
        constants: numbers that may be its ``alpha`` or ``limit``.
    """
    generator = torch.Generator().manual_seed(0)
    where = dict(dtype=torch.float64, device="cpu")  # whatever the caller's default device is
    probe = torch.randn(512, 16, generator=generator, **where) * torch.logspace(-1, 2, 512, **where)[:, None]
    try:
        with torch.no_grad():
            expected = function(probe)
    except Exception:  # whatever a family's code raises on a tensor that is not its own: it is no formula of ours
        return None
    for activation in _candidates(has_up, constants):
        found = activation(probe)
        if found.shape == expected.shape and torch.allclose(found.to(expected.dtype), expected, rtol=1e-5, atol=1e-7):
            return activation
    return None


def _candidates(has_up, constants):
    numbers = sorted({float(number) for number in constants if 0 < number < float("inf")})
    shapes = itertools.product((False, True), (0.0, 1.0)) if has_up else [(False, 0.0)]
    for (is_interleaved, offset), limit in itertools.product(shapes, [None, *numbers]):
        for kind in _FUNCTIONS:
            for alpha in [1.0, 1.702, *numbers] if kind == "silu" else [1.0]:
                yield Activation(kind, has_up, is_interleaved, alpha, limit, offset)
