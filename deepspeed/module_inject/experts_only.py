# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Expert parallelism that replaces the experts only: the family's block, router and shared experts stay as they are.

The experts module keeps its name, its parameters' names and its place in the model. Its parameters become this rank's
slice, its forward sends rows to the ranks that hold their experts (``deepspeed.moe.expert_dispatch``).
"""
import contextlib
import dataclasses
from contextvars import ContextVar

import torch

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.expert_dispatch import dispatched_forward, with_any_routing
from deepspeed.moe.expert_layout import identity_layout
from deepspeed.moe.expert_turns import take_turns
from deepspeed.moe.fast_experts import FastExperts
from deepspeed.moe.experts_interface import (check_experts_module, expert_parameters, is_experts_module,
                                             router_parameters)
from deepspeed.runtime.zero.expert_partitioning import construct_partitioned, experts_born_partitioned
from deepspeed.runtime.zero.persistence import gather_persistent, untrace
from deepspeed.utils import groups

# What the expert_parallel block may say; its other keys are about the routing and computing of a replaced block.
EXPERTS_ONLY_KEYS = {"enabled", "autoep_size", "expert_tensor_parallel_size", "reshard_bucket_bytes"}

_local_state_wanted = ContextVar("local_state_wanted", default=False)


@contextlib.contextmanager
def local_state():
    """Let ``state_dict`` return this rank's experts inside the block, for a checkpoint that every rank writes to."""
    token = _local_state_wanted.set(True)
    try:
        yield
    finally:
        _local_state_wanted.reset(token)


def _refuse_state_dict(module, prefix, keep_vars):
    if not _local_state_wanted.get():
        raise RuntimeError(
            f"state_dict of {prefix.rstrip('.')}: found {module.num_local_experts} of {module.num_experts} experts on "
            "this rank, which would be saved under the numbers of others; allowed: engine.save_hf_checkpoint, "
            "Trainer.save_model, or state_dict=Accelerator.get_state_dict(model), called on all ranks")


class ExpertParallelExperts(AutoEPMoELayer):
    """A family's experts module that holds the experts of this rank; see ``replace_experts``.

    It is an ``AutoEPMoELayer`` to DeepSpeed, which asks by ``isinstance`` and reads ``num_experts`` (of all ranks),
    ``num_local_experts``, ``ep_size``, ``ep_rank``, ``ep_group_name``; and it stays an instance of the family's class
    to everybody else. Outside this class ``num_experts`` is the number of all experts; only the family's forward sees
    the local number (``_local_experts``).
    """

    def set_deepspeed_parallelism(self, *args, **kwargs):
        """Nothing to bind: the groups are looked up by name."""

    @property
    def ep_group(self):
        return groups._get_expert_parallel_group(self.ep_group_name)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """``[..., H]`` of this rank's tokens, computed by the experts of all ranks of the EP group."""
        gather_persistent(param for child in self.children() for param in child.parameters())
        compute = self.fast_experts.compute(self, hidden_states)
        if compute is None:
            compute = with_any_routing(self._family_forward, self.num_local_experts)
        return dispatched_forward(compute, hidden_states, top_k_index, top_k_weights, self.num_experts, self.ep_group)

    def _family_forward(self, *routed):
        local = self._local_experts()  # of the class: hooks and this class's forward belong to the module as a whole
        return type(local).forward(local, *routed)

    def _local_experts(self):
        """The family's own module with the same parameters and children, which counts this rank's experts only."""
        local = object.__new__(self.family_class)
        local.__dict__.update(vars(self), num_experts=self.num_local_experts)
        return local


@dataclasses.dataclass
class ExpertsSpec:
    """An experts module that was found. The constants are what DeepSpeed's checks of a block's routing read."""
    moe_module_name: str
    num_experts: int
    score_apply: str = "post"
    num_expert_groups: int = 1
    num_limited_groups: int = 1


def find_experts(model):
    """``ExpertsSpec`` of every experts module of ``model``, in the model's order."""
    return [
        ExpertsSpec(name, module.num_experts) for name, module in model.named_modules() if is_experts_module(module)
    ]


def check_experts(model, specs, ep_size):
    """Raise ValueError when experts cannot be split: what was found and what is allowed, of every module concerned."""
    for spec in specs:
        module = model.get_submodule(spec.moe_module_name)
        check_experts_module(module, spec.moe_module_name)
        expert_parameters(module, spec.moe_module_name)
    unfit = [f"{spec.moe_module_name} (E={spec.num_experts})" for spec in specs if spec.num_experts % ep_size]
    if unfit:
        common = [d for d in range(1, ep_size + 1) if not any(spec.num_experts % d for spec in specs)]
        raise ValueError(f"expert_parallel.autoep_size: found {ep_size}, which does not divide the experts of "
                         f"{', '.join(unfit)}; allowed: {', '.join(map(str, common))}")


def replace_experts(model, specs, ep_size, ep_rank):
    """Make every experts module of ``specs`` hold this rank's slice of its experts, in place.

    Modules with the same parameters (tied) stay tied.

    Returns:
        list: pairs of a new parameter and the one that it was sliced from.
    """
    replaced, by_source = [], {}
    for spec in specs:
        module = model.get_submodule(spec.moe_module_name)
        sources = expert_parameters(module, spec.moe_module_name)
        for param in router_parameters(model, spec.moe_module_name):
            param.ds_force_persist = True
        key = tuple(id(param) for param in sources.values())
        if key not in by_source:
            by_source[key] = _sliced(sources, spec, ep_size, ep_rank)
            replaced += [(param, sources[name]) for name, param in by_source[key].items()]
        _convert(module, spec, by_source[key], ep_size, ep_rank)
    take_turns(model, [spec.moe_module_name for spec in specs])
    return replaced


class _Slices(torch.nn.Module):
    """Parameters of the given shapes (``name -> shape``), as empty as the device they are constructed on."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))


def _sliced(sources, spec, ep_size, ep_rank):
    """This rank's slice of ``sources`` as tagged parameters; partitioned when the sources are."""
    shapes = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in sources.items()}
    local = spec.num_experts // ep_size
    with experts_born_partitioned(lambda: identity_layout(shapes), sources, ep_size, ep_rank) as partitioned:
        if partitioned:
            slices = dict(construct_partitioned(_Slices, {n: (local, *s[1:]) for n, s in shapes.items()})
                          .named_parameters())  # yapf: disable
        else:
            slices = {name: _slice_of(param, ep_rank * local, local) for name, param in sources.items()}
    for name, param in slices.items():
        param.requires_grad_(sources[name].requires_grad)
        _tag(param, ep_size)
    return slices


def _slice_of(param, start, count):
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([param]):
        return torch.nn.Parameter(param.data[start:start + count].clone())


def _tag(param, ep_size):
    """Say what DeepSpeed asks of an expert parameter: over which ranks it is partitioned and its gradient reduced."""
    param.allreduce = False
    param.group_name = param.ds_zero_partition_group_name = f"ep_size_{ep_size}"
    param.ds_zero_placement_family = "autoep_expert"


def _convert(module, spec, slices, ep_size, ep_rank):
    for name, param in slices.items():
        setattr(module, name, param)
    # The activation, and the norm after the experts: called once per expert that has rows, on this rank alone. So they
    # must not be gathered on demand.
    for inside in list(module.modules())[1:]:
        untrace(inside)
    family = type(module)
    module.__class__ = type(f"ExpertParallel{family.__name__}", (ExpertParallelExperts, family), {})
    module.family_class = family
    if ep_size > 1:
        module.register_state_dict_pre_hook(_refuse_state_dict)
    module.ep_size, module.ep_rank, module.ep_group_name = ep_size, ep_rank, f"ep_size_{ep_size}"
    module.num_local_experts = spec.num_experts // ep_size
    module.fast_experts = FastExperts.of(module)
