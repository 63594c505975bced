# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Whole weights come out of a checkpoint whose experts are spread, by the functions and by the script beside it."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import families
from checkpoints import PRELOAD, SIZES, config, saved_run
from deepspeed.utils import zero_to_fp32
from ranks import rank_group

two_ranks = rank_group(2, preload=PRELOAD)


@pytest.fixture(scope="module")
def saved(two_ranks, tmp_path_factory):
    """A folder with a checkpoint of (N=2, EP=2), six experts, and the float32 weights of the engine that saved it."""
    folder = str(tmp_path_factory.mktemp("saved"))
    expected = two_ranks.run(saved_run, folder, config(2), num_experts=6, more=0)[0]["state"]["tensors"]
    return folder, {name[:-len("@fp32")]: array for name, array in expected.items() if name.endswith("@fp32")}


def _assert_equal(found, expected):
    assert expected.keys() == {name for name in found if "inv_freq" not in name}
    for name, array in expected.items():
        assert found[name].dtype == torch.float32
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)


def test_state_dict_has_whole_experts(saved):
    folder, expected = saved
    _assert_equal(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder), expected)
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2", lazy_mode=True)
    _assert_equal({name: tensor.contiguous() for name, tensor in lazy.items()}, expected)


def test_weights_load_into_the_model(saved):
    folder, expected = saved
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(
        families.build("qwen3_moe", seed=5, num_experts=6, **SIZES), folder)  # yapf: disable
    _assert_equal(model.state_dict(), expected)


def _files(folder):
    found = {}
    for name in os.listdir(folder):
        if name.endswith(".bin"):
            found.update(torch.load(os.path.join(folder, name)))
    return found


def test_converted_in_several_files(saved, tmp_path):
    folder, expected = saved
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, str(tmp_path), max_shard_size="20KB")
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".bin")]) > 1
    _assert_equal(_files(tmp_path), expected)


def _run(script, *arguments):
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_script_beside_the_checkpoint(saved, tmp_path):
    folder, expected = saved
    script = os.path.join(folder, "zero_to_fp32.py")
    assert os.access(script, os.X_OK)
    _run(script, folder, str(tmp_path / "out"), "--tag", "global_step2", "--max_shard_size", "20KB")
    _assert_equal(_files(tmp_path / "out"), expected)
    if os.path.exists(os.path.join(folder, "zero_to_torch.py")):  # from 0.19.7 on; it imports the script
        _run(os.path.join(folder, "zero_to_torch.py"), folder, str(tmp_path / "bf16"), "--dtype", "bf16")
        for name, tensor in _files(tmp_path / "bf16").items():
            assert torch.equal(tensor, torch.from_numpy(expected[name]).bfloat16()), name
