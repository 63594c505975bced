# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the Trainer and Accelerate save, in the middle of a run as well, loads as the model that was trained."""
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
from engines import ds_config
from ranks import rank_group

OPTIMIZER = {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}}

two_ranks, four_ranks = rank_group(2), rank_group(4)


def trained(source, folder, config, **arguments):
    """A Trainer that has trained for two steps and saved after each."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=folder, max_steps=2, save_strategy="steps", save_steps=1,
                                  per_device_train_batch_size=2, learning_rate=5e-3, report_to="none", use_cpu=True,
                                  disable_tqdm=True, deepspeed=config, **arguments)  # yapf: disable
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.randint(3, families.VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    return trainer


def config_of(ep, **zero):
    return ds_config(ep, zero, gradient_clipping=1.0, optimizer=OPTIMIZER)


def train_and_save(source, folder, ep):
    """Train, save in every other way too, return the weights."""
    from deepspeed.utils import safe_get_full_fp32_param
    from parity import gathered

    trainer = trained(source, folder, config_of(ep, stage3_gather_16bit_weights_on_model_save=True))
    trainer.save_model(f"{folder}/trainer")
    trainer.accelerator.save_model(trainer.model_wrapped, f"{folder}/accelerate")
    trainer.model_wrapped.save_hf_checkpoint(f"{folder}/engine")
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return weights, gathered(trainer.model, safe_get_full_fp32_param)


def train_and_save_below_stage_3(source, folder, stage):
    """The same where ``save_checkpoint`` is refused, so that the Trainer is asked for the model only."""
    from family_parity import weight_of
    from parity import gathered

    trainer = trained(source, folder, config_of(2, stage=stage), save_only_model=True)
    trainer.save_model(f"{folder}/trainer")
    trainer.accelerator.save_model(trainer.model_wrapped, f"{folder}/accelerate")
    trainer.model_wrapped.save_16bit_model(f"{folder}/engine")
    return gathered(trainer.model, weight_of)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2])
def test_every_way_saves_below_stage_3(two_ranks, tmp_path, stage):
    families.build("qwen3_moe").save_pretrained(tmp_path / "source")
    expected, _ = two_ranks.run(train_and_save_below_stage_3, str(tmp_path / "source"), str(tmp_path), stage)
    by_class = [AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
                for folder in ("trainer", "checkpoint-2")]  # yapf: disable
    by_file = [load_file(tmp_path / "accelerate" / "model.safetensors"),
               torch.load(tmp_path / "engine" / "pytorch_model.bin")]  # yapf: disable
    for found in (*by_class, *by_file):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("ranks, ep", [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), (4, 4)])
def test_every_way_saves_the_trained_model(request, tmp_path, ranks, ep):
    families.build("qwen3_moe").save_pretrained(tmp_path / "source")
    group = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    (weights, expected), *others = group.run(train_and_save, str(tmp_path / "source"), str(tmp_path), ep)
    assert [state for state, _ in others] == [None] * (ranks - 1)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict()
    assert set(weights) == set(expected) == set(before)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights.items() if "experts" in name)
    for folder in ("trainer", "engine", "checkpoint-2"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), folder
    midway = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    assert not torch.equal(midway["lm_head.weight"], weights["lm_head.weight"])
    by_accelerate = load_file(tmp_path / "accelerate" / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in by_accelerate.items())
