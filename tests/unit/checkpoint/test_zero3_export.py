# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``ds_autoep export`` writes from a checkpoint's folder the files that the engine itself would have written."""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

import families
from checkpoints import PRELOAD
from deepspeed.checkpoint.zero3_export import export_checkpoint
from deepspeed_autoep import cli
from engines import ds_config
from init_memory import LiveBytes
from ranks import rank_group
from test_hf_export import SHARD, assert_same_checkpoint, tensors_in, trained

two_ranks = rank_group(2, preload=PRELOAD)


def saved_both_ways(family, config, source, folder):
    """Train a step, save to ``folder/deepspeed`` and, as a plain checkpoint, to ``folder/expected``."""
    with trained(family, config, steps=1) as engine:
        engine.module.config._name_or_path = source
        if engine.module.can_generate():
            engine.module.generation_config = GenerationConfig.from_pretrained(source)
        engine.save_checkpoint(f"{folder}/deepspeed", tag="step1")
        engine.save_hf_checkpoint(f"{folder}/expected", max_shard_size=SHARD)


@pytest.fixture(scope="module")
def saved(two_ranks, tmp_path_factory):
    """``saved(family, **of ds_config)``: a folder with ``source``, ``deepspeed`` and ``expected``; each made once."""
    made = {}

    def run(family, autoep_size=2, dtype=None):
        key = family, autoep_size, dtype
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp("saved")
            model = families.build(family)
            if model.can_generate():
                model.generation_config.max_new_tokens = 17
            model.save_pretrained(folder / "source")
            (folder / "source" / "tokenizer.json").write_text("{}")
            two_ranks.run(saved_both_ways, family, ds_config(autoep_size, dtype=dtype), str(folder / "source"),
                          str(folder))  # yapf: disable
        return made[key]

    return run


def export(folder, output, *options):
    return cli.main(["export", str(folder / "deepspeed"), str(output), "--model", str(folder / "source"), *options])


# A matrix per expert on disk; biases, and views with gaps; a buffer; a conversion that is more than a view.
@pytest.mark.parametrize("family", [
    pytest.param("qwen3_moe", marks=pytest.mark.floor), "gpt_oss", "deepseek_v3", "inkling2"])  # yapf: disable
def test_same_as_the_engines(family, saved, tmp_path):
    folder = saved(family)
    assert export(folder, tmp_path, "--max-shard-size", SHARD) == 0
    assert_same_checkpoint(tmp_path, folder / "expected")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("autoep_size, dtype", [(None, None), (2, "bf16")], ids=["plain ZeRO-3", "bf16"])
def test_other_engines(autoep_size, dtype, saved, tmp_path):
    folder = saved("qwen3_moe", autoep_size, dtype)
    assert export(folder, tmp_path, "--max-shard-size", SHARD, "--tag", "step1", "--dtype", dtype or "float32") == 0
    assert_same_checkpoint(tmp_path, folder / "expected")


def test_cast_and_loaded_by_transformers(saved, tmp_path):
    folder = saved("qwen3_moe")
    assert export(folder, tmp_path, "--dtype", "bf16") == 0
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", "model.safetensors",
                                            "tokenizer.json"]  # yapf: disable
    expected = tensors_in(folder / "expected")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.generation_config.max_new_tokens == 17
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        assert torch.equal(tensor, found[name]), name


class _Made(LiveBytes):
    """Leaves out what is only looked at: the files of ranks, mapped into memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_holds_one_file(saved, tmp_path):
    folder = saved("qwen3_moe")
    with _Made() as counted:
        export_checkpoint(folder / "deepspeed", tmp_path, folder / "source", max_shard_size=SHARD)
    assert 0 < counted.peak <= max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))


def _changed(folder, **values):
    """Change the configuration in ``folder``."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def _without_latest(folder):
    os.remove(folder / "deepspeed" / "latest")


def _unfinished(folder):
    (folder / "deepspeed" / "step1" / "INCOMPLETE").touch()


def _without_a_file(folder):
    os.remove(folder / "deepspeed" / "step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


REFUSED = {
    "no checkpoint": (_without_latest, "found no file latest"),
    "unfinished": (_unfinished, "step1: found INCOMPLETE, so saving was interrupted there"),
    "a missing file": (_without_a_file, "found no zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "another size": (lambda folder: _changed(folder / "source", moe_intermediate_size=12),
                     "of another shape: model.layers.0.mlp.experts.gate_up_proj (8, 32, 32) for (8, 24, 32)"),
    "tied": (lambda folder: _changed(folder / "source", tie_word_embeddings=True), "unexpected: lm_head.weight"),
    "no model": (lambda folder: shutil.rmtree(folder / "source"), "MODEL: found "),
    "no class": (lambda folder: _changed(folder / "source", architectures=["Gone"]),
                 "MODEL: found architectures ['Gone']"),
}  # yapf: disable


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason, saved, tmp_path, capsys):
    shutil.copytree(saved("qwen3_moe"), tmp_path / "copy")
    change, message = REFUSED[reason]
    change(tmp_path / "copy")
    (tmp_path / "output").mkdir()
    assert export(tmp_path / "copy", tmp_path / "output") == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path / "output") == []


def test_code_that_comes_with_the_model(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    shutil.copytree(saved("qwen3_moe"), tmp_path / "copy")
    (tmp_path / "copy" / "source" / "modeling_mine.py"
     ).write_text("from transformers import Qwen3MoeForCausalLM\n\n\nclass Mine(Qwen3MoeForCausalLM):\n    pass\n")
    _changed(tmp_path / "copy" / "source", architectures=["Mine"], auto_map={
        "AutoModelForCausalLM": "modeling_mine.Mine"})  # yapf: disable
    assert export(tmp_path / "copy", tmp_path / "output") == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert export(tmp_path / "copy", tmp_path / "output", "--trust-remote-code") == 0
    assert (tmp_path / "output" / "modeling_mine.py").is_file()
    found, expected = tensors_in(tmp_path / "output"), tensors_in(saved("qwen3_moe") / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def saved_whole_blocks(folder):
    with trained("qwen3_moe", ds_config(2, preset="qwen3_moe")) as engine:
        engine.save_checkpoint(folder)


def test_whole_blocks_are_refused(saved, two_ranks, tmp_path, capsys):
    shutil.copytree(saved("qwen3_moe") / "source", tmp_path / "source")
    two_ranks.run(saved_whole_blocks, str(tmp_path / "deepspeed"))
    assert export(tmp_path, tmp_path / "output") == 2
    assert "found experts that are spread as whole blocks" in capsys.readouterr().err
