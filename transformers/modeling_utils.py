# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where ``from_pretrained`` reads a checkpoint under ZeRO-3."""
from deepspeed_autoep.extension import extends


@extends("PreTrainedModel._load_pretrained_model",
         feature="hf-import",
         why="each rank reads what it will own; rank 0 used to read every file and to gather module after module")
def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
    if state_dict is None and checkpoint_files and expected_keys is None and _spreads_experts():
        from deepspeed.checkpoint import hf_import  # imports DeepSpeed, which a job without it need not have

        if hf_import.can_read_shards(model, checkpoint_files, load_config):
            return hf_import.read_shards(model, checkpoint_files, load_config), None
    return _load_pretrained_model.original(model, state_dict, checkpoint_files, load_config, expected_keys)


def _spreads_experts():
    from transformers.integrations import deepspeed_config, is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled() and deepspeed_config().get("expert_parallel", {}).get("enabled", False)
