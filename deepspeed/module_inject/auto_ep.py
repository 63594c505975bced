# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Finding the MoE layers of a model."""
from deepspeed_autoep.extension import extends


@extends("AutoEP.ep_parser",
         feature="config-errors",
         why="a model without MoE layers, or one replaced before, is an error and not a silent run without experts")
def ep_parser(self):
    replaced = [name for name, module in self.model.named_modules() if getattr(module, "_is_autoep_layer", False)]
    if replaced:
        raise ValueError(f"expert_parallel: found {type(self.model).__name__} with '{replaced[0]}' (and "
                         f"{len(replaced) - 1} more) already replaced by an earlier deepspeed.initialize; allowed: a "
                         "model that was not passed to it yet. Build or load the model again.")
    specs = ep_parser.original(self)
    if not specs:
        raise ValueError(f"expert_parallel.enabled: found no MoE layer in {type(self.model).__name__} (model_type="
                         f"{getattr(self.model_config, 'model_type', None)!r}); allowed: a model of a preset's type, "
                         "or moe_layer_pattern with custom names. For a plain ZeRO run set enabled to false.")
    return specs
