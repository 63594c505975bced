# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""A bad ``expert_parallel`` block is one error, on every rank, before any collective, and never a hang.

The error must name the key, the value that was found and what is allowed.
"""
import contextlib
from unittest import mock

import pytest

import tiny_models
from engines import ds_config, engine_of
from ranks import rank_group

two_ranks = rank_group(2)

# What is wrong: (block, zero_optimization, further top-level keys) and what the message must contain.
CASES = {
    "not an integer": (dict(autoep_size="2"), {}, {}, ["expert_parallel.autoep_size", "'2'", "valid integer"]),
    "a boolean degree": (dict(autoep_size=True), {}, {}, ["expert_parallel.autoep_size", "True", "valid integer"]),
    "zero": (dict(autoep_size=0), {}, {}, ["expert_parallel.autoep_size", "0", "greater than or equal to 1"]),
    "does not divide N": (dict(autoep_size=3), {}, {}, ["expert_parallel.autoep_size", "3", "2 ranks", "[1, 2]"]),
    "does not divide E": ({}, {}, {}, ["autoep_size: found 2", "model.layers.0.mlp.experts (E=5)", "allowed: 1"]),
    "does not divide E of blocks": (dict(preset_model="qwen3_moe"), {}, {}, ["autoep_size=2", "num_experts=5"]),
    "more than E": ({}, {}, {}, ["autoep_size: found 2", "model.layers.0.mlp.experts (E=1)", "allowed: 1"]),
    "key of whole blocks": (dict(top_k=2), {}, {}, ["found top_k", "allowed: leaving them out, or preset_model"]),
    "unknown preset": (dict(preset_model="mistral"), {}, {}, ["expert_parallel.preset_model", "'mistral'", "mixtral"]),
    "unknown key": (dict(autoep_sise=2), {}, {}, ["expert_parallel.autoep_sise", "unknown key", "autoep_size"]),
    "bad choice": (dict(combine_impl="sum"), {}, {}, ["expert_parallel.combine_impl", "'sum'", "weighted_sum"]),
    "bad number": (dict(top_k="two"), {}, {}, ["expert_parallel.top_k", "'two'", "auto", "integer"]),
    "no expert chosen": (dict(top_k=0), {}, {}, ["expert_parallel.top_k", "0", "greater than 0"]),
    "infinite": (dict(route_scale=float("inf")), {}, {}, ["expert_parallel.route_scale", "inf", "finite"]),
    "bad pattern": (dict(moe_layer_pattern="("), {}, {}, ["expert_parallel.moe_layer_pattern", "'('", "regular"]),
    "unknown activation": (dict(expert_activation="relu"), {}, {},
                           ["expert_parallel.expert_activation", "'relu'", "allowed: swiglu"]),
    "no events": (dict(async_split_plan=True), {}, {}, ["expert_parallel.async_split_plan", "True", "cpu", "False"]),
    "not a block": ({}, {}, dict(expert_parallel=True), ["expert_parallel: found True", "allowed: a block"]),
    "bucket of nothing": (dict(reshard_bucket_bytes=0), {}, {}, ["expert_parallel.reshard_bucket_bytes", "0", "1"]),
    "load balancing": (dict(load_balance_coeff=0.1), {}, {}, ["expert_parallel.load_balance_coeff", "0.1", "None"]),
    "expert TP": (dict(expert_tensor_parallel_size=2), {}, {},
                  ["expert_parallel.expert_tensor_parallel_size", "2", "allowed: 1"]),
    "dotted name": (dict(expert_w1="a.b"), {}, {}, ["expert_parallel.expert_w1", "'a.b'"]),
    "quantized gradients": ({}, dict(zero_quantized_gradients=True), {},
                            ["zero_quantized_gradients", "True", "False"]),
    "hpZeRO": ({}, dict(zero_hpz_partition_size=2), {}, ["zero_hpz_partition_size", "2", "allowed: 1"]),
    "sequence parallel": ({}, {}, dict(sequence_parallel_size=2), ["sequence_parallel_size", "2", "allowed: 1"]),
    "wrong preset": (dict(preset_model="mixtral"), {}, {}, ["mixtral", "qwen3_moe"]),
}  # yapf: disable


_COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather", "all_to_all_single", "new_group")


@contextlib.contextmanager
def counted_collectives():
    """Yield the list of names of the collectives that this rank starts inside the block."""
    import torch.distributed

    started = []
    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            original = getattr(torch.distributed, name)

            def counting(*args, _name=name, _original=original, **kwargs):
                started.append(_name)
                return _original(*args, **kwargs)

            patches.enter_context(mock.patch.object(torch.distributed, name, counting))
        yield started


def initialize_whole_model(config, overrides):
    """``deepspeed.initialize`` with a model held whole, so that only our own collectives could come first."""
    import deepspeed

    model = tiny_models.build("qwen3_moe", experts_implementation="eager", **overrides)
    with counted_collectives() as started:
        try:
            deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        finally:
            if started:
                raise AssertionError(f"collectives before the error: {started}")


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(two_ranks, case):
    block, zero, top_level, wanted = CASES[case]
    overrides = {
        "does not divide E": dict(num_experts=5),
        "does not divide E of blocks": dict(num_experts=5),
        "more than E": dict(num_experts=1, num_experts_per_tok=1)
    }
    config = ds_config(2, block=block, zero=zero, **top_level)
    for error in two_ranks.errors(initialize_whole_model, config, overrides.get(case, {})):
        assert error.startswith("ValueError: "), error
        assert all(part in error for part in wanted), error


def initialize_dense():
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2))  # yapf: disable
    deepspeed.initialize(model=model, config=ds_config(2), model_parameters=model.parameters())


def test_a_model_without_experts(two_ranks):
    for error in two_ranks.errors(initialize_dense):
        assert "no MoE layer in LlamaForCausalLM" in error and "'llama'" in error and "enabled to false" in error


def train_disabled(checkpoint):
    import torch

    from engines import autoep_layers
    config = ds_config(2, block=dict(enabled=False, preset_model="no such preset"))
    with engine_of(checkpoint, config) as engine:
        ids = torch.ones(2, 4, dtype=torch.long)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        return len(autoep_layers(engine.module))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny_models.build("qwen3_moe").save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_enabled_false_is_a_plain_zero3_run(two_ranks, checkpoint):
    assert two_ranks.run(train_disabled, str(checkpoint)) == [0, 0]


def initialize_twice(checkpoint):
    import deepspeed

    config = ds_config(2)
    with engine_of(checkpoint, config) as engine:
        deepspeed.initialize(model=engine.module, config=config)


def test_a_model_replaced_before(two_ranks, checkpoint):
    for error in two_ranks.errors(initialize_twice, str(checkpoint)):
        assert "model.layers.0.mlp" in error and "already replaced" in error


def load(checkpoint):
    with engine_of(checkpoint, ds_config(2)):
        pass


def test_a_checkpoint_that_is_missing_a_shard(two_ranks, checkpoint, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    for error in two_ranks.errors(load, str(broken)):
        assert shard.name in error, error


def warnings_about(block):
    """What reading a configuration with this ``expert_parallel`` block warns of."""
    from deepspeed.module_inject import auto_ep_config

    with mock.patch.object(auto_ep_config.logger, "warning") as warning:
        auto_ep_config.parse_autoep_config(block)
    return [call.args[0] for call in warning.call_args_list]


def test_a_block_that_does_not_say_whether_it_is_enabled(two_ranks):
    for warnings in two_ranks.run(warnings_about, {"autoep_size": 2}):
        assert len(warnings) == 1 and 'without "enabled"' in warnings[0]
    assert two_ranks.run(warnings_about, {"enabled": False, "autoep_size": 2}) == [[]] * 2
