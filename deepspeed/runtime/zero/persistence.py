# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Parameters that must stay gathered.

``param.ds_force_persist = True`` is a contract between a transform that replaces modules and ZeRO-3: the parameter
stays gathered whatever ``stage3_param_persistence_threshold`` and ``stage3_model_persistence_threshold`` say. Its
elements count toward the model total, so that ordinary small parameters share what is left. Set it before the engine
is made; before the parameter is partitioned, if its shard must be on the device although parameters are offloaded.
"""


def force_persist(param) -> bool:
    """Whether ``param`` carries the marker."""
    return getattr(param, "ds_force_persist", False)
