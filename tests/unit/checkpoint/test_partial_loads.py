# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Loading weights alone and frozen parameters; checkpoints that cannot be loaded are refused by all ranks."""
import os
import shutil

import numpy as np
import pytest

from checkpoints import PRELOAD, assert_same_state, config, loaded_run, refused_load, saved_run
from ranks import rank_group

two_ranks = rank_group(2, preload=PRELOAD)

EXPERTS = ("only", ("experts.gate_up_proj", "experts.down_proj"))
ALL_BUT_ROUTERS = ("all but", "mlp.gate.weight")
FROZEN = {"nothing": None, "experts": EXPERTS, "all but routers": ALL_BUT_ROUTERS}
SAME, LOWER, PLAIN = config(2), config(1, {"sub_group_size": 3000}), config(None)


@pytest.fixture(scope="module")
def saved(two_ranks, tmp_path_factory):
    """``saved(name)``: folder and results of a run at (N=2, EP=2) in which ``FROZEN[name]`` was frozen."""
    made = {}

    def run(frozen):
        if frozen not in made:
            folder = str(tmp_path_factory.mktemp("saved"))
            made[frozen] = folder, two_ranks.run(saved_run, folder, SAME, freeze=FROZEN[frozen], num_experts=6)[0]
        return made[frozen]

    return run


@pytest.mark.parametrize("to", [SAME, LOWER, PLAIN], ids=["same", "EP=1", "plain"])
@pytest.mark.parametrize("frozen", ["experts", "all but routers"])
def test_frozen_parameters(frozen, to, saved, two_ranks):
    folder, expected = saved(frozen)
    for found in two_ranks.run(loaded_run, folder, to, freeze=FROZEN[frozen], num_experts=6):
        assert any("experts.down_proj@frozen" in name for name in found["state"]["tensors"])
        assert_same_state(found["state"], expected["state"])
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6)


@pytest.mark.parametrize("to", [SAME, LOWER, PLAIN], ids=["same", "EP=1", "plain"])
@pytest.mark.parametrize("how", ["load_module_only", "load_optimizer_states"])
def test_weights_alone(how, to, saved, two_ranks):
    folder, expected = saved("nothing")
    load = {how: how == "load_module_only"}
    weights = {name: array for name, array in expected["state"]["tensors"].items() if name.endswith("@fp32")}
    for found in two_ranks.run(loaded_run, folder, to, load=load, moments=False, num_experts=6):
        state = found["state"]
        assert state["tensors"].keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(state["tensors"][name], array, err_msg=name)
        assert state["optimizer steps"] == []  # no state yet, as in a new engine
        assert state["counters"] == ((0, 0, 0) if how == "load_module_only" else expected["state"]["counters"])
        # The first loss is of the same weights, later ones of an optimizer that starts again.
        np.testing.assert_allclose(found["losses"][0], expected["losses"][0], rtol=1e-6)


@pytest.mark.parametrize("to", [SAME, LOWER], ids=["same", "EP=1"])
def test_frozen_weights_become_trained(to, saved, two_ranks):
    folder, expected = saved("experts")
    for error, unchanged in two_ranks.run(refused_load, folder, to, num_experts=6):
        assert "found no optimizer state of model.layers.0.mlp.experts.gate_up_proj" in error, error
        assert unchanged
    load = dict(load_optimizer_states=False)
    for found in two_ranks.run(loaded_run, folder, to, load=load, moments=False, num_experts=6):
        for name, array in expected["state"]["tensors"].items():
            name = name.replace("@frozen", "@fp32")
            if name.endswith("@fp32"):
                np.testing.assert_array_equal(found["state"]["tensors"][name], array, err_msg=name)


MISFITS = {
    "another size": (dict(moe_intermediate_size=16),
                     r"of another shape: model.layers.0.mlp.experts.gate_up_proj (6, 30, 33) for (6, 32, 33)"),
    "more layers": (dict(num_hidden_layers=3), "missing: model.layers.2."),
    "fewer layers": (dict(num_hidden_layers=1), "unexpected: model.layers.1."),
    "more experts": (dict(num_experts=8), "mlp.gate.weight (6, 33) for (8, 33)"),
}  # yapf: disable


@pytest.mark.parametrize("to", [SAME, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["EP=2", "plain"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_another_models_checkpoint(misfit, to, saved, two_ranks):
    arguments, message = MISFITS[misfit]
    for error, unchanged in two_ranks.run(refused_load, saved("nothing")[0], to, **{"num_experts": 6, **arguments}):
        assert error.startswith("ValueError: ") and "found the checkpoint of another model" in error, error
        assert message in error, error
        assert unchanged


def _without_a_file(folder):
    os.remove(os.path.join(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt"))


def _cut_off(folder):
    os.truncate(os.path.join(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt"), 5000)


DAMAGES = {"a missing file": (_without_a_file, "found no zero_pp_rank_1_mp_rank_00_optim_states.pt"),
           "a file cut off": (_cut_off, "rank_1_mp_rank_00_optim_states.pt: found a file that cannot be read"),
           "no folder": (shutil.rmtree, "found no zero_pp_rank_0_mp_rank_00_model_states.pt")}  # yapf: disable


@pytest.mark.parametrize("to", [SAME, pytest.param(LOWER, marks=pytest.mark.slow)], ids=["same", "EP=1"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(damage, to, saved, two_ranks, tmp_path):
    shutil.copytree(saved("nothing")[0], tmp_path, dirs_exist_ok=True)
    change, message = DAMAGES[damage]
    change(tmp_path / "global_step2")
    for error, unchanged in two_ranks.run(refused_load, str(tmp_path), to, num_experts=6):
        assert message in error, error
        assert unchanged
