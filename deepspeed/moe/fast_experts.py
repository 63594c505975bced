# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which experts the grouped GEMMs of ``deepspeed.moe.expert_compute`` compute, and which stay as they are."""
import dataclasses
import functools
from typing import Callable, NamedTuple, Optional

import torch

from deepspeed.moe.expert_activations import recognised
from deepspeed.moe.expert_compute import ExpertWeights, compute_experts
from deepspeed.moe.experts_interface import up_name
from deepspeed.moe.kernel_choice import row_kernels, why_no_grouped_gemm

_ALIGNED = 16  # bytes: rows of a grouped GEMM


@dataclasses.dataclass(frozen=True)
class FastExperts:
    """What is known of one experts module before its first forward.

    Attributes:
        activation: what ``ExpertWeights`` takes.
        why_not: why the module keeps the family's forward; None when it does not.
    """
    activation: Optional[Callable] = None
    why_not: Optional[str] = None

    @classmethod
    def of(cls, module):
        """Look at a module on Transformers' experts interface, without reading a parameter."""
        why_not = why_no_grouped_gemm() or _why_not(module)
        if why_not is not None:
            return cls(why_not=why_not)
        function = module._apply_gate if module.has_gate else module.act_fn
        constants = [value for value in vars(module).values() if type(value) in (int, float)]
        return cls(recognised(function, module.has_gate, constants) or function)

    def compute(self, module, tokens):
        """The ``compute`` of ``dispatched_forward`` for tensors like ``tokens``, or None."""
        if self.why_not is not None or module.config._experts_implementation != "grouped_mm":
            return None
        names = up_name(module), "down_proj"
        up, down = (getattr(module, name) for name in names)
        if not fits(tokens, up, down):
            return None
        bias = [getattr(module, f"{name}_bias") if module.has_bias else None for name in names]
        weights = ExpertWeights((up, ), down, self.activation, *bias, module.is_transposed)
        return functools.partial(compute_experts, weights)


class Routed(NamedTuple):
    """What a replaced block's ``GroupedExperts`` takes in place of numbers of rows; see ``compute_experts``."""
    indices_TK: torch.Tensor
    weights_TK: Optional[torch.Tensor]


def fits(tokens, *weights):
    """Whether tensors, also partitioned ones, have a device, dtype and sizes that grouped GEMMs are fast for."""
    if row_kernels(tokens) is None or why_no_grouped_gemm() is not None:
        return False
    sizes = [size for weight in weights for size in getattr(weight, "ds_shape", weight.shape)[1:]]
    return (all(size * tokens.element_size() % _ALIGNED == 0 for size in sizes)
            and all(weight.dtype == tokens.dtype for weight in weights)
            and (tokens.dtype == torch.bfloat16 or not tokens.is_cuda))  # yapf: disable


def _why_not(module):
    if not hasattr(module, "has_gate"):
        return "the class does not say what its tensors are (use_experts_implementation)"
    if module.has_post_expert_norm or any(True for child in module.children() for _ in child.parameters()):
        return "modules with parameters compute between or after the projections"
    if any(isinstance(child, torch.nn.Dropout) for child in module.modules()):
        return "dropout inside the experts"
    return None
