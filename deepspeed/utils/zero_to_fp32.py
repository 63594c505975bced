# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole weights from a checkpoint whose experts are spread over ranks."""
import os

from deepspeed_autoep.extension import extends


@extends("get_fp32_state_dict_from_zero_checkpoint",
         feature="zero-to-fp32",
         why="experts are joined from the ranks that hold them; converting and loading build on this function")
def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir,
                                             tag=None,
                                             exclude_frozen_parameters=False,
                                             lazy_mode=False):
    # Here, as this module is loaded while deepspeed itself is.
    from deepspeed.checkpoint.safe_save import check_finished, saved_tag
    from deepspeed.checkpoint.whole_weights import whole_tensors
    from deepspeed.checkpoint.zero3_shards import SavedShards, is_spread
    from deepspeed.utils.zero_to_fp32 import to_torch_tensor

    found = saved_tag(checkpoint_dir, tag)
    folder = found and os.path.join(checkpoint_dir, found)
    if folder:
        check_finished(folder)
    if not (folder and is_spread(folder)):
        return get_fp32_state_dict_from_zero_checkpoint.original(checkpoint_dir, tag, exclude_frozen_parameters,
                                                                 lazy_mode)
    tensors = whole_tensors(SavedShards(folder), exclude_frozen_parameters)
    return tensors if lazy_mode else to_torch_tensor(tensors)
