# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The replacement layer: experts born partitioned, routers marked to stay gathered, names remembered for saving."""
import dataclasses
from typing import NamedTuple

import torch

from deepspeed.moe.ep_repack import _get_expert_weight
from deepspeed.moe.expert_layout import Layout, grouped_layout, module_list_layout, separate_layout
from deepspeed.moe.fast_experts import Routed, fits
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.zero.expert_partitioning import (are_born_partitioned, construct_partitioned,
                                                        experts_born_partitioned)
from deepspeed_autoep.extension import extends

_PARTITIONED = "partitioned-experts"


def _expert_sources(experts, spec):
    """The parameters of a block's experts by the names that its layout gives them."""
    names = [name for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) if name is not None]
    if spec.expert_storage == "module_list":
        return {
            f"{index}.{name}": _get_expert_weight(expert, name)
            for index, expert in enumerate(experts)
            for name in names
        }
    return {name: getattr(experts, name) for name in names}


def _layout_of(spec, sources):
    """The layout from a block's experts to the grouped experts' ``w1``, ``w2``, ``w3``."""
    shapes = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in sources.items()}
    w1, w2, w3 = spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name
    if spec.expert_storage == "module_list":
        return module_list_layout(shapes, spec.num_experts, gate=w1, down=w2, up=w3)
    if w3 is not None:
        return separate_layout(shapes, w1, w2, w3)
    fused = classify_fused_gate_up_layout(shapes[w1], shapes[w2])
    return grouped_layout(shapes, gate_up=w1, down=w2, is_transposed=fused is not None and fused.needs_transpose)


@extends("AutoEPMoELayer.__init__",
         feature=_PARTITIONED,
         why="a layer's new experts are partitioned over their expert-data-parallel group as they are constructed")
def construct_with_partitioned_experts(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    sources = _expert_sources(getattr(source_module, spec.experts_name), spec)
    with experts_born_partitioned(lambda: _layout_of(spec, sources), sources, ep_size, ep_rank):
        construct_with_partitioned_experts.original(self, spec, source_module, ep_size, ep_rank, config, *args,
                                                    **kwargs)


@extends("repack_expert_weights", feature=_PARTITIONED, why="no rank gathers a layer to copy its experts out of it")
def repack_expert_weights(experts_source, spec, ep_rank, ep_size):
    if are_born_partitioned():
        return None, None, None
    return repack_expert_weights.original(experts_source, spec, ep_rank, ep_size)


# The name is a function from here on; only the layer's constructor below it uses it.
@extends("GroupedExperts", feature=_PARTITIONED, why="constructed as shards, filled from the shards of the source")
def grouped_experts(dim, hidden_dim, num_experts, *args, **kwargs):
    return construct_partitioned(grouped_experts.original, dim, hidden_dim, num_experts, *args, **kwargs)


@extends("_copy_parameter_data", feature=_PARTITIONED, why="experts that were born partitioned are filled already")
def _copy_parameter_data(target, source):
    if source is not None:
        _copy_parameter_data.original(target, source)


@extends("AutoEPMoELayer.__init__",
         feature="force-persist",
         why="a released router costs a hidden all-gather per layer in backward, or fails (up to 0.19.3)")
def construct_with_persistent_router(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    construct_with_persistent_router.original(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs)
    for param in self.router.parameters():  # weight, bias, and a trainable score-correction bias
        param.ds_force_persist = True


@extends("AutoEPMoELayer.forward",
         feature="expert-kernels",
         why="the layer's own path sorts, permutes and weights its rows in 2.4 times the time of the grouped GEMMs")
def forward_with_kernels(self, hidden_states):
    if not _is_for_kernels(self, hidden_states):
        return forward_with_kernels.original(self, hidden_states)
    from deepspeed.moe.expert_dispatch import dispatched_forward  # it needs the module that this one extends

    tokens_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    weights_TK, indices_TK, counts_E = self.router(tokens_TH, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts_E)

    def compute(rows_RH, *routed):
        return self.experts(rows_RH, Routed(*routed))

    output = dispatched_forward(compute, hidden_states, indices_TK, weights_TK, self.num_experts, self.ep_group)
    return self._finalize_output(output, tokens_TH, hidden_states, hidden_states.shape[-1])


def _is_for_kernels(layer, hidden_states):
    """Whether a layer takes the path that is the default: nothing was chosen that the kernels would pass over."""
    if not fits(hidden_states, layer.experts.w1, layer.experts.w2) or not hasattr(layer, "_finalize_output"):
        return False  # DeepSpeed 0.19.6 has the end of this forward nowhere else
    folding = layer.folding_group_handles
    return (layer.experts.use_grouped_mm and layer.experts.gate_up_impl == "separate" and layer.score_apply == "post"
            and layer.combine_impl == "weighted_sum" and not layer.async_split_plan
            and (layer.ep_size == 1 or layer.comm_backend == "comm")
            and (folding is None or folding.spec.tp_size == 1))  # yapf: disable


class Unmodified(NamedTuple):
    """How the tensors of the block that a layer replaced are found in the layer. Names are relative to either.

    Attributes:
        layout: sections from the block's expert tensors to the layer's ``w1``, ``w2`` and ``w3``.
        names: the layer's other tensors -> what the block called them.
        order: all names of the block, as its state dict has them.
    """
    layout: Layout
    names: dict
    order: tuple


@extends("AutoEPMoELayer.__init__",
         feature="hf-checkpoint",
         why="a trained layer is saved under the names, and in the shapes, of the block that it replaced")
def remember_unmodified(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs):
    sources = _expert_sources(getattr(source_module, spec.experts_name), spec)
    names = {id(param): name for name, param in source_module.named_parameters()}
    order = tuple(source_module.state_dict())
    remember_unmodified.original(self, spec, source_module, ep_size, ep_rank, config, *args, **kwargs)
    layout = _layout_of(spec, sources)  # only now: experts that do not fit have failed on all ranks together
    self.unmodified = Unmodified(_renamed(layout, {
        key: names[id(param)]
        for key, param in sources.items()
    }), _names_in_block(self, spec), order)


def _renamed(layout, names):
    sections = [
        dataclasses.replace(section, source=dataclasses.replace(section.source, tensor=names[section.source.tensor]))
        for section in layout.sections
    ]
    return Layout(tuple(sections), layout.targets, {names[key]: shape for key, shape in layout.sources.items()})


def _names_in_block(layer, spec):
    moved = {"router.gate": spec.router_name, "shared_experts": spec.shared_experts_name,
             "shared_experts_gate": spec.shared_experts_gate_name}  # yapf: disable
    owner = getattr(spec, "e_score_correction_bias_path", None)
    moved["router"] = spec.router_name if owner is None else owner
    names = {}
    for name in layer.state_dict():
        module = max((prefix for prefix in moved if name.startswith(f"{prefix}.")), key=len, default=None)
        if module is not None:
            names[name] = f"{moved[module]}{name[len(module):]}".lstrip(".")
    return names
