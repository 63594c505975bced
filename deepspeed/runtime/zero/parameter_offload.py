# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``ds_force_persist`` where ZeRO-3 chooses the parameters that stay gathered, and where it releases the others."""
import contextlib

from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.runtime.zero.persistence import force_persist, is_untraced
from deepspeed.utils import z3_leaf_module
from deepspeed_autoep.extension import extends


@extends("DeepSpeedZeRoOffload.mark_persistent_parameters",
         feature="force-persist",
         why="a parameter marked ds_force_persist stays gathered, whatever the persistence thresholds say")
def mark_persistent_parameters(self, param_threshold, model_threshold):
    params = [param for _, param in self.module.named_parameters(recurse=True)]
    persistent = {id(param) for param in params if force_persist(param)}
    total = sum(param.ds_numel for param in params if id(param) in persistent)
    for param in params:
        if id(param) in persistent or param.ds_numel > param_threshold or total + param.ds_numel > model_threshold:
            continue
        persistent.add(id(param))
        total += param.ds_numel
    # In the model's order: the list is gathered in one call, on every rank alike.
    kept = [param for param in params if id(param) in persistent]
    for param in kept:
        param.ds_persist = True
    return kept


_HELD = "ds_force_persist"  # stands in a parameter's set of active modules, which holds their integer ids


@contextlib.contextmanager
def _held(offload, sub_module):
    """Keep the marked parameters of ``sub_module`` from being released inside the block.

    Until the coordinator has seen one whole pass in the order that follows, it releases every parameter after use,
    persistent ones too: in the first step, and again after a pass of another shape such as an evaluation.
    """
    is_leaf = z3_leaf_module(sub_module)
    marked = [param for param in iter_params(sub_module, recurse=is_leaf) if force_persist(param)]
    if is_leaf and offload.fast_sharding_for_leaf_module:
        marked = []  # released by overwriting the data of all its parameters, active or not
    for param in marked:
        param.ds_active_sub_modules.add(_HELD)
    try:
        yield
    finally:
        for param in marked:
            param.ds_active_sub_modules.discard(_HELD)


_WHY_HELD = "a parameter marked ds_force_persist is not released while the module trace is incomplete"


@extends("DeepSpeedZeRoOffload.post_sub_module_forward_function", feature="force-persist", why=_WHY_HELD)
def post_sub_module_forward_function(self, sub_module):
    with _held(self, sub_module):
        post_sub_module_forward_function.original(self, sub_module)


@extends("DeepSpeedZeRoOffload.post_sub_module_backward_function", feature="force-persist", why=_WHY_HELD)
def post_sub_module_backward_function(self, sub_module):
    with _held(self, sub_module):
        post_sub_module_backward_function.original(self, sub_module)


@extends("DeepSpeedZeRoOffload._register_deepspeed_module",
         feature="experts-only",
         why="what some ranks call more often than others would make their traces of modules differ, and stop them")
def register_deepspeed_module(self, module, count=[0]):
    if not is_untraced(module):
        return register_deepspeed_module.original(self, module, count)
    for child in module.children():
        count[0] += 1
        self._register_deepspeed_module(child, count=count)
