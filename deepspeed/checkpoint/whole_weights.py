# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole float32 weights from a ZeRO-3 checkpoint, in one process without a model or an accelerator."""
import argparse
import os
import stat

import torch

# Stands beside a checkpoint in place of DeepSpeed's copy of its own converter, which joins shards of all ranks.
# DeepSpeed's zero_to_torch.py beside it imports this file by its name, and what it needs from there.
SCRIPT = '''#!/usr/bin/env python
"""Joins the shards of this checkpoint, whose experts are spread over ranks, into whole float32 weights: --help."""
import deepspeed_autoep  # noqa: F401  pip install deepspeed-autoep
from deepspeed.checkpoint.whole_weights import main
from deepspeed.utils.zero_to_fp32 import *  # noqa: F401,F403

if __name__ == "__main__":
    main()
'''


class WholeTensor:
    """A parameter that is read when ``contiguous()`` is called, so that one after the other fits into memory."""

    def __init__(self, saved, name):
        self._saved, self._name = saved, name
        self.shape = torch.Size(saved.held[name].shape)
        self.dtype = saved.dtype(name)

    def contiguous(self):
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._saved.read(self._name, 0, into=whole.view(-1))
        return whole


def whole_tensors(saved, exclude_frozen_parameters=False):
    """Name -> ``WholeTensor`` of every parameter of a ``SavedShards``, and its buffers, by the model's names.

    Trained parameters are float32, frozen ones have the dtype that they were trained beside, floating buffers are
    float32. Tied parameters are one object under all their names.
    """
    saved.check_complete()
    found = {name: buffer.float() if buffer.is_floating_point() else buffer for name, buffer in saved.buffers.items()}
    for name, held in saved.held.items():
        if held.sub_group is not None or not exclude_frozen_parameters:
            found[name] = WholeTensor(saved, name)
    tied = {name: source for name, source in saved.model_states(0)["shared_params"].items() if source in found}
    return {**found, **{name: found[source] for name, source in tied.items()}}


def write_script(folder):
    """Write ``zero_to_fp32.py`` for the checkpoints in ``folder``, with the command line of DeepSpeed's."""
    path = os.path.join(folder, "zero_to_fp32.py")
    with open(path, "w") as file:
        file.write(SCRIPT)
    os.chmod(path, os.stat(path).st_mode | stat.S_IEXEC)


def main(arguments=None):
    """Convert the checkpoint that the command line names."""
    from deepspeed.utils import zero_to_fp32

    parser = argparse.ArgumentParser(description="Whole float32 weights from a ZeRO checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder with the file latest and a folder for each tag")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, as 500MB (default: %(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of pickle")
    parser.add_argument("-t", "--tag", help="which checkpoint, as global_step10 (default: what latest names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="say more while converting")
    options = vars(parser.parse_args(arguments))
    zero_to_fp32.debug = options.pop("debug")
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(**options)
