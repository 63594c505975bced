# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""An engine's model comes out as the files that ``save_pretrained`` writes for the unmodified model, bit by bit."""
import contextlib
import errno
import gc
import json
import os
import signal
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
from engines import ds_config
from init_memory import LiveBytes
from ranks import RankFailure, RankGroup, rank_group

SHARD = "20KB"
# Halves and a matrix per expert; biases, transposed and interleaved; tied embeddings; shared experts; conversions that
# are more than views; experts that two modules share; a model of images.
KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3", "inkling2", "diffusion_gemma:full",
         "dots3_note:vision"]  # yapf: disable

two_ranks, four_ranks = rank_group(2), rank_group(4)


@contextlib.contextmanager
def trained(family, config, steps=0, partitioned=True):
    """Yield an engine of the family's tiny model after some steps on random inputs that differ between ranks."""
    import deepspeed
    import deepspeed.comm as dist

    model = families.build(family).to(torch.bfloat16 if "bf16" in config else torch.float32)
    if partitioned:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    params = [param for param in model.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=model, config=config, model_parameters=params)[0]
    try:
        for step in range(steps):
            batch = families.inputs(family, model, seed=10 * step + dist.get_rank())
            engine.backward(families.scalar_loss(engine(**batch)))
            engine.step()
        yield engine
    finally:
        engine.destroy()
        del engine, model
        gc.collect()


def export(family, config, folder, whole=None, **trained_arguments):
    """Save as a plain checkpoint to ``folder`` and, consolidated on rank 0, to ``whole``."""
    with trained(family, config, **trained_arguments) as engine:
        engine.save_hf_checkpoint(folder, max_shard_size=SHARD)
        if whole is not None:
            state = engine._zero3_consolidated_16bit_state_dict()
            if state is not None:
                families.build(family).save_pretrained(whole, state_dict=state, max_shard_size=SHARD)


def tensors_in(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def assert_same_checkpoint(found, expected):
    assert sorted(os.listdir(found)) == sorted(os.listdir(expected))
    for file in expected.glob("*.json"):
        assert json.loads((found / file.name).read_text()) == json.loads(file.read_text()), file.name
    tensors, wanted = tensors_in(found), tensors_in(expected)
    assert list(tensors) == list(wanted)
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def check_round_trip(group, folder, family, config):
    """Untrained, saved by all ranks and by rank 0: both are what the unmodified model saves."""
    families.build(family).save_pretrained(folder / "expected", max_shard_size=SHARD)
    group.run(export, family, config, str(folder / "all_ranks"), str(folder / "rank_0"))
    for found in ("all_ranks", "rank_0"):
        assert_same_checkpoint(folder / found, folder / "expected")


@pytest.mark.parametrize("family", [
    *KINDS, *[
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.families])
        for name in families.names() if name not in KINDS
    ]
])
def test_round_trip_of_a_family(two_ranks, tmp_path, family):
    check_round_trip(two_ranks, tmp_path, family, ds_config(2))


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("mixtral", marks=pytest.mark.floor),
        pytest.param("qwen3_moe", marks=pytest.mark.floor),
        "deepseek_v3",  # whose correction bias, a buffer, DeepSpeed 0.19.6 drops when it replaces the block
    ])
def test_round_trip_of_whole_blocks(two_ranks, tmp_path, preset):
    check_round_trip(two_ranks, tmp_path, preset, ds_config(2, preset=preset))


@pytest.mark.parametrize("ep, stage", [(2, 3), (4, 3), (2, 1), (1, 3)])
def test_round_trip_at_four_ranks(four_ranks, tmp_path, ep, stage):
    families.build("gpt_oss").save_pretrained(tmp_path / "expected", max_shard_size=SHARD)
    config = ds_config(ep, zero={"stage": stage})
    four_ranks.run(export, "gpt_oss", config, str(tmp_path / "found"), partitioned=stage == 3)
    assert_same_checkpoint(tmp_path / "found", tmp_path / "expected")


def export_and_compute(folder, config):
    with trained("mixtral", config, steps=2) as engine:
        engine.save_hf_checkpoint(folder)
        engine.save_16bit_model(folder, "consolidated.bin")
        engine.eval()
        with torch.no_grad():
            return engine(**families.inputs("mixtral", engine.module, seed=3)).logits


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_trained_model_loads_without_deepspeed(two_ranks, tmp_path, dtype):
    config = ds_config(2, {"stage3_gather_16bit_weights_on_model_save": True}, dtype)
    logits = two_ranks.run(export_and_compute, str(tmp_path), config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", attn_implementation="eager")
    assert model.dtype == (torch.float32 if dtype is None else torch.bfloat16)
    with torch.no_grad():
        expected = model(**families.inputs("mixtral", model, seed=3)).logits
    for found in logits:
        if dtype is None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:  # rounding sends a token or two to another expert
            assert ((found - expected).abs() < 0.1).float().mean() > 0.9
    consolidated = torch.load(tmp_path / "consolidated.bin", weights_only=True)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in consolidated.items())
    assert set(consolidated) == set(state)


def extra_bytes(folder, bucket_bytes):
    """Bytes that saving holds at most, beside the model; and those of the largest file."""
    config = ds_config(2, {"stage3_param_persistence_threshold": 0}, block={"reshard_bucket_bytes": bucket_bytes})
    with trained("qwen3_moe", config) as engine, LiveBytes() as counted:
        shards = [param.ds_tensor.view(-1) for param in engine.module.parameters()]  # seen now, so not counted as new
        counted.reset()
        model_bytes = counted.live
        engine.save_hf_checkpoint(folder, max_shard_size=SHARD)
        peak = counted.peak - model_bytes
        del shards
    return peak, max(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))


def test_peak_is_a_file_and_a_bucket(four_ranks, tmp_path):
    for peak, largest in four_ranks.run(extra_bytes, str(tmp_path), 4096):
        assert peak <= largest + 4096 + 4096  # and some vectors of a few numbers


def rank_dependent_export(folders):
    import deepspeed.comm as dist

    export("mixtral", ds_config(2), folders[dist.get_rank()])


def test_ranks_without_the_folder_write_nothing(two_ranks, tmp_path):
    families.build("mixtral").save_pretrained(tmp_path / "expected", max_shard_size=SHARD)
    two_ranks.run(rank_dependent_export, [str(tmp_path / "found"), str(tmp_path / "elsewhere")])
    assert_same_checkpoint(tmp_path / "found", tmp_path / "expected")
    assert not (tmp_path / "elsewhere").exists()


def test_files_of_the_tokenizer_are_carried_over(two_ranks, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    two_ranks.run(export_named, str(tmp_path / "source"), str(tmp_path / "found"))
    assert (tmp_path / "found" / "tokenizer.json").read_text() == "{}"


def export_named(source, folder):
    with trained("mixtral", ds_config(2)) as engine:
        engine.module.config._name_or_path = source
        engine.save_hf_checkpoint(folder)


def save_failing(folder, where, how):
    """Save the trained model; rank 1 fails while it writes a file, or rank 0 while weights change places."""
    import deepspeed.comm as dist
    from deepspeed.checkpoint import hf_export, staging

    def fail(*args, **kwargs):
        if how == "full":
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), signal.SIGKILL)

    module, name, rank = {"writing": (hf_export, "save_file", 1), "naming": (staging.os, "link", 0),
                          "moving": (staging.os, "replace", 0)}[where]  # yapf: disable
    with trained("mixtral", ds_config(2), steps=1) as engine:
        with mock.patch.object(module, name, fail) if dist.get_rank() == rank else contextlib.nullcontext():
            engine.save_hf_checkpoint(folder, max_shard_size=SHARD)


@pytest.mark.parametrize("how, where", [
    ("full", "writing"), ("killed", "writing"), ("killed", "naming"), ("killed", "moving"),
    *(pytest.param("full", where, marks=pytest.mark.slow) for where in ("naming", "moving"))
])  # yapf: disable
def test_the_checkpoint_before_stays(two_ranks, tmp_path, where, how):
    two_ranks.run(export, "mixtral", ds_config(2), str(tmp_path))
    before = tensors_in(tmp_path)
    doomed = RankGroup(2)
    try:
        if how == "full":
            errors = doomed.errors(save_failing, str(tmp_path), where, how, timeout=60)
            assert all("No space left on device" in error for error in errors)
        else:
            with pytest.raises(RankFailure):
                doomed.run(save_failing, str(tmp_path), where, how, timeout=30)
    finally:
        doomed.close()
    killed = how == "killed" and where != "writing"  # the rank that cleans up
    stayed = tmp_path / ".previous" if killed and where == "moving" else tmp_path
    assert (tmp_path / ".incomplete").exists() == (tmp_path / ".previous").exists() == killed
    assert tensors_in(stayed).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_in(stayed).items())
    AutoModelForCausalLM.from_pretrained(stayed)
    two_ranks.run(export, "mixtral", ds_config(2), str(tmp_path), steps=1)
    assert not (tmp_path / ".incomplete").exists() and not (tmp_path / ".previous").exists()
    after = tensors_in(tmp_path)
    assert set(after) == set(before) and not all(torch.equal(after[name], before[name]) for name in before)


def export_without_links(folder):
    """As on a file system where a file has one name only."""
    from deepspeed.checkpoint import staging

    def refuse(*args):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    with mock.patch.object(staging.os, "link", refuse):
        export("mixtral", ds_config(2), folder)


def test_weights_that_are_links_are_kept_whole(tmp_path):
    """As in a folder of the Hub's cache, whose files are relative links."""
    from deepspeed.checkpoint import staging

    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    families.build("mixtral").save_pretrained(tmp_path / "blobs")
    os.symlink("../blobs/model.safetensors", tmp_path / "snapshot/model.safetensors")
    staging._name_again(tmp_path / "snapshot", tmp_path / "snapshot/.previous")
    kept = tmp_path / "snapshot/.previous/model.safetensors"
    assert not kept.is_symlink() and kept.samefile(tmp_path / "blobs/model.safetensors")


def export_with_adapters(folder):
    with trained("mixtral", ds_config(2)) as engine:
        engine.module._hf_peft_config_loaded = True  # what add_adapter leaves; peft is not installed here
        engine.save_hf_checkpoint(folder)


def test_adapters_inside_the_model_are_refused(two_ranks, tmp_path):
    for error in two_ranks.errors(export_with_adapters, str(tmp_path)):
        assert "found MixtralForCausalLM with adapters" in error
    assert os.listdir(tmp_path) == []


def test_saving_again_where_files_have_one_name(two_ranks, tmp_path):
    for _ in range(2):
        two_ranks.run(export_without_links, str(tmp_path))
    families.build("mixtral").save_pretrained(tmp_path / "expected", max_shard_size=SHARD)
    assert tensors_in(tmp_path).keys() == tensors_in(tmp_path / "expected").keys()
    assert not (tmp_path / ".previous").exists()


def export_of_another_class(folder):
    with trained("mixtral", ds_config(2)) as engine:
        engine.module = torch.nn.Sequential(engine.module)
        engine.save_hf_checkpoint(folder)


def test_other_models_are_refused(two_ranks, tmp_path):
    for error in two_ranks.errors(export_of_another_class, str(tmp_path)):
        assert error == ("ValueError: save_hf_checkpoint: found Sequential; allowed: a model of Transformers (for "
                         "adapters, merge them first or use Trainer.save_model)")
    assert os.listdir(tmp_path) == []
