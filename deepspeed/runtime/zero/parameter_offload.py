# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters that must stay gathered.

``param.ds_force_persist = True`` is a contract between a transform that replaces modules and ZeRO-3: the parameter
stays gathered whatever ``stage3_param_persistence_threshold`` and ``stage3_model_persistence_threshold`` say. Its
elements count toward the model total, so that ordinary small parameters share what is left.
"""
from deepspeed_autoep.extension import extends


def force_persist(param):
    """Whether ``param`` carries the marker."""
    return getattr(param, "ds_force_persist", False)


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
