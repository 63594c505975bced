# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``from_pretrained`` under ZeRO-3 with experts spread: each rank reads its shards, bit by bit what the files hold."""
import contextlib
import gc
import json
import os
import struct
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from transformers import AutoModelForCausalLM

import families
from engines import ds_config
from init_memory import LiveBytes
from ranks import rank_group

SHARD = "20KB"
# A matrix per expert; biases, transposed; tied embeddings; shared experts; renamed parts; several models in one.
KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3", "deepseek_v4", "diffusion_gemma:full"]

two_ranks, four_ranks = rank_group(2), rank_group(4)
read_by_rank_0 = rank_group(2, DS_AUTOEP_OFF="hf-import")


@contextlib.contextmanager
def loaded(model_class, folder, config=None, **options):
    """Yield ``model_class.from_pretrained(folder)``, partitioned with a DeepSpeed configuration."""
    from transformers.integrations import HfDeepSpeedConfig

    hf_config = config and HfDeepSpeedConfig(config)  # from_pretrained looks for it as long as it lives
    model = model_class.from_pretrained(folder, **options)
    try:
        yield model
    finally:
        del model, hf_config
        gc.collect()


def compare(model_class, folder, config=None, reference_class=None, **options):
    """Assert that this rank's shards are those of the model loaded whole; return how many elements it holds."""
    import deepspeed.comm as dist
    from deepspeed.moe.reshard import zero3_placement

    model_class = type(families.build(model_class)) if isinstance(model_class, str) else model_class
    whole = (reference_class or model_class).from_pretrained(folder, **options).state_dict()
    elements = 0
    with loaded(model_class, folder, config or ds_config(2), **options) as model:
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not hasattr(tensor, "ds_tensor"):
                assert tensor.dtype == whole[name].dtype and torch.equal(tensor, whole[name]), name
                continue
            start, stop = zero3_placement(whole[name].numel(), dist.get_world_size()).interval(dist.get_rank())
            assert tensor.ds_tensor.dtype == whole[name].dtype and tensor.ds_shape == whole[name].shape, name
            assert torch.equal(tensor.ds_tensor[:stop - start], whole[name].flatten()[start:stop]), name
            elements += stop - start
        assert [name for name in whole if name not in model.state_dict()] == []
    return elements


@pytest.mark.parametrize("family", [
    *KINDS, *[pytest.param(name, marks=[pytest.mark.slow, pytest.mark.families])
              for name in families.names() if name not in KINDS]
])  # yapf: disable
def test_a_family_is_loaded(two_ranks, tmp_path, family):
    families.build(family).save_pretrained(tmp_path, max_shard_size=SHARD)
    assert all(elements > 0 for elements in two_ranks.run(compare, family, str(tmp_path)))


@pytest.mark.parametrize("experts", [6, 5])
def test_sizes_that_do_not_divide(four_ranks, tmp_path, experts):
    families.build("qwen3_moe", num_experts=experts, hidden_size=33, moe_intermediate_size=15).save_pretrained(
        tmp_path, max_shard_size=SHARD)  # yapf: disable
    four_ranks.run(compare, AutoModelForCausalLM, str(tmp_path), ds_config(1))


@pytest.mark.floor
def test_another_dtype(two_ranks, tmp_path):
    families.build("mixtral").save_pretrained(tmp_path)
    two_ranks.run(compare, "mixtral", str(tmp_path), ds_config(2, dtype="bf16"), dtype=torch.bfloat16)


def test_names_as_in_memory(two_ranks, tmp_path):
    """Fused tensors, as Transformers has them in memory, are taken from a file as well."""
    model = families.build("mixtral")
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    two_ranks.run(compare, "mixtral", str(tmp_path))


def body_and_head(folders):
    """The body from the whole model's files, then the whole model from the body's files, with a new head."""
    from transformers import MixtralForCausalLM, MixtralModel

    compare(MixtralModel, folders[0])
    with loaded(MixtralForCausalLM, folders[1], ds_config(2), output_loading_info=True) as (model, info):
        assert info["missing_keys"] == {"lm_head.weight"}
        assert model.lm_head.weight.ds_tensor.abs().sum() > 0  # initialized


def test_body_without_its_head(two_ranks, tmp_path):
    model = families.build("mixtral")
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "body")
    two_ranks.run(body_and_head, [str(tmp_path / "whole"), str(tmp_path / "body")])


def dense_beside(folders):
    """Models without experts in the same job load as ever: a new pooler is initialized."""
    from transformers import BertModel

    with loaded(BertModel, folders[0], ds_config(2), output_loading_info=True) as (model, info):
        assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
    compare(AutoModelForCausalLM, folders[1])


def test_dense_model_and_ties_from_either_end(two_ranks, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    families.build("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    _rewrite(tmp_path / "tied/model.safetensors",
             lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    two_ranks.run(dense_beside, [str(tmp_path / "bert"), str(tmp_path / "tied")])


def failing_to_read(folder):
    import deepspeed.comm as dist
    from deepspeed.checkpoint import hf_import

    def fail(*args):
        raise OSError(5, "Input/output error")

    with mock.patch.object(hf_import._Reader, "_mapped", fail) if dist.get_rank() else contextlib.nullcontext():
        faults(folder)


def test_no_rank_waits_for_one_that_cannot_read(two_ranks, tmp_path):
    families.build("mixtral").save_pretrained(tmp_path)
    for error in two_ranks.errors(failing_to_read, str(tmp_path)):
        assert error == "FailedOnRank: rank 1: OSError: [Errno 5] Input/output error"


def composite(folder):
    from transformers import Qwen3VLMoeForConditionalGeneration

    compare(Qwen3VLMoeForConditionalGeneration, folder)


def test_prefixes_of_a_vision_language_model(two_ranks, tmp_path):
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=4,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])  # yapf: disable
    text = families.build("qwen3_vl_moe").config.to_dict()
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    two_ranks.run(composite, str(tmp_path))


def what_is_read(folder):
    """Bytes that this rank copied from the files, largest growth of live bytes meanwhile, and bytes of its shards."""
    from deepspeed.checkpoint import hf_import

    mapped, read, source_view, seen = hf_import._Reader._mapped, hf_import._Reader.read, hf_import.Move.source_view, {}
    with LiveBytes() as counted:

        def watched_mapping(*args):
            with disable_current_modes():
                tensor = mapped(*args)
            counted.leave_out([tensor])
            return tensor

        def watched_read(*args):
            before, seen["read"] = counted.live, 0
            counted.reset()
            read(*args)
            seen["grown"] = counted.peak - before

        def watched_view(*args):
            view = source_view(*args)
            seen["read"] += view.nbytes
            return view

        with mock.patch.object(hf_import._Reader, "_mapped", watched_mapping), \
                mock.patch.object(hf_import._Reader, "read", watched_read), \
                mock.patch.object(hf_import.Move, "source_view", watched_view), \
                loaded(AutoModelForCausalLM, folder, ds_config(2)) as model:
            seen["shards"] = sum(param.ds_tensor.nbytes for param in model.parameters())
    return seen


def test_each_rank_reads_its_part(four_ranks, tmp_path):
    model = families.build("qwen3_moe", num_experts=6)
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    size = sum(param.nbytes for param in model.parameters())
    found = four_ranks.run(what_is_read, str(tmp_path))
    assert sum(seen["read"] for seen in found) == size
    for seen in found:
        assert seen["read"] <= seen["shards"] <= size / 4 + 4 * len(list(model.parameters()))
        assert seen["grown"] == 0  # no tensor is held beside the shards, let alone a layer


def faults(folder, **options):
    with loaded(AutoModelForCausalLM, folder, ds_config(2), **options):
        pass


def _shards(folder):
    return sorted(folder.glob("*.safetensors"))


def _rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _missing(folder):
    _drop_from_index(folder, "experts.3.w1.weight")
    return "missing in the files: model.layers.0.block_sparse_moe.experts.3.w1.weight"


def _drop_from_index(folder, end):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in _shards(folder):
        found = [name for name in load_file(path) if "layers.0" in name and name.endswith(end)]
        if found:
            _rewrite(path, lambda tensors: tensors.pop(found[0]))
            del index["weight_map"][found[0]]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _whole_tensor_missing(folder):
    _drop_from_index(folder, "self_attn.q_proj.weight")
    return "missing: model.layers.0.self_attn.q_proj.weight"


def _unexpected(folder):
    _rewrite(_shards(folder)[0], lambda tensors: tensors.update({"model.layers.7.mlp.gate.weight": torch.ones(3)}))
    return "unexpected: model.layers.7.mlp.gate.weight"


def _shard_with(folder, end):
    return next(path for path in _shards(folder) if any(name.endswith(end) for name in load_file(path)))


def _misshapen(folder):
    path = _shard_with(folder, "model.norm.weight")
    _rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    return "of another shape: model.norm.weight (31,) for (32,)"


def _expert_misshapen(folder):
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    _rewrite(_shard_with(folder, name), lambda tensors: tensors.update({name: torch.ones(32, 15)}))
    return f"of another shape in the files: {name} (32, 15) for (32, 48)"


def _of_another_kind(folder):
    path = _shard_with(folder, "model.norm.weight")
    _rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))
    return "of another kind: model.norm.weight torch.int32 for torch.float32"


def _truncated(folder):
    path = _shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-10])
    return f"{path}: found a file that cannot be read"


def _header_too_long(folder):
    path = _shards(folder)[1]
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 40) + content[8:])
    return f"{path}: found a file that cannot be read"


def _with_header(path, change):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])


def _overlapping(folder):

    def change(header):
        first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
        second["data_offsets"] = first["data_offsets"]

    _with_header(_shards(folder)[1], change)
    return f"{_shards(folder)[1]}: found a file that cannot be read"


def _outside(folder):

    def change(header):
        entry = [entry for name, entry in header.items() if name != "__metadata__"][-1]
        entry["data_offsets"] = [offset + (1 << 30) for offset in entry["data_offsets"]]

    _with_header(_shards(folder)[1], change)
    return f"{_shards(folder)[1]}: found a file that cannot be read"


def _dtype_of_another_size(folder):

    def change(header):
        next(entry for name, entry in header.items() if name != "__metadata__")["dtype"] = "BF16"

    _with_header(_shards(folder)[1], change)
    return f"{_shards(folder)[1]}: found a file that cannot be read"


def _absent_file(folder):
    _shards(folder)[1].unlink()
    return f"{_shards(folder)[0].parent / 'model-00002-of-'}"


def _not_in_its_file(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    files["model.norm.weight"] = next(file for file in files.values() if file != files["model.norm.weight"])
    path.write_text(json.dumps(index))
    return "found 1 tensors that are not in the files that it names: model.norm.weight"


def _leaving_the_folder(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    os.rename(_shards(folder)[-1], folder.parent / "elsewhere.safetensors")
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: "../elsewhere.safetensors" if file == last else file
                           for name, file in index["weight_map"].items()}  # yapf: disable
    path.write_text(json.dumps(index))
    return "in ../elsewhere.safetensors; allowed: files below its folder"


FAULTS = [_missing, _whole_tensor_missing, _unexpected, _misshapen, _expert_misshapen, _of_another_kind, _truncated,
          _header_too_long, _overlapping, _outside, _dtype_of_another_size, _absent_file, _not_in_its_file,
          _leaving_the_folder]  # yapf: disable


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_wrong_checkpoint_is_refused(two_ranks, tmp_path, fault):
    folder = tmp_path / "checkpoint"
    families.build("mixtral").save_pretrained(folder, max_shard_size=SHARD)
    expected = fault(folder)
    for error in two_ranks.errors(faults, str(folder)):
        assert "ValueError: " in error and expected in error, error


def test_pickle_is_refused_unless_asked_for(two_ranks, tmp_path):
    model = families.build("mixtral")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for error in two_ranks.errors(faults, str(tmp_path)):
        assert "pytorch_model.bin, a pickle file" in error and "use_safetensors=False to ask for pickle" in error
    two_ranks.run(compare, "mixtral", str(tmp_path), use_safetensors=False)


def test_switched_off_rank_0_reads_all(read_by_rank_0, tmp_path):
    """What is measured above is ours: without it nobody maps the files with our reader."""
    families.build("mixtral").save_pretrained(tmp_path)
    assert [seen.keys() for seen in read_by_rank_0.run(what_is_read, str(tmp_path))] == [{"shards"}] * 2
