# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters that must stay gathered.

``param.ds_force_persist = True`` is a contract between a transform that replaces modules and ZeRO-3: the parameter
stays gathered whatever ``stage3_param_persistence_threshold`` and ``stage3_model_persistence_threshold`` say. Its
elements count toward the model total, so that ordinary small parameters share what is left. Set it before the engine
is made; before the parameter is partitioned, if its shard must be on the device although parameters are offloaded.
"""

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


def force_persist(param) -> bool:
    """Whether ``param`` carries the marker."""
    return getattr(param, "ds_force_persist", False)


def untrace(module):
    """Keep ``module`` out of ZeRO-3's trace, which must be the same on all ranks; its parameters stay gathered."""
    module.ds_untraced = True
    for param in module.parameters(recurse=False):
        param.ds_force_persist = True


def is_untraced(module) -> bool:
    """Whether ZeRO-3 gathers nothing for calls of ``module``."""
    return getattr(module, "ds_untraced", False)


def gather_persistent(params):
    """Gather those of ``params`` that are released, as all are before their first use; a collective, if any."""
    released = [param for param in params if getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    if released:
        released[0].all_gather(param_list=released)
