# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the examples train and on what, so that each script shows nothing but its own way of training.

The model is a Qwen3-MoE whose tokens are bytes. It learns to write Python: its text is the source code of Python's
own standard library, which every machine that runs this file has. ``python examples/tiny_moe.py FOLDER`` writes the
untrained model to FOLDER, as an ordinary Hugging Face checkpoint.
"""
import argparse
import json
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

CHECKPOINT = "runs/tiny_moe"
# The context length is also the length of a training example.
SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             num_experts=16, num_experts_per_tok=2, moe_intermediate_size=128,
             max_position_embeddings=256)  # yapf: disable


def argument_parser(name):
    """The options that every script has; ``name`` is the script's, for its figures."""
    parser = argparse.ArgumentParser(description="Train a Hugging Face MoE model with expert parallelism.")
    parser.add_argument("--model", default=CHECKPOINT, help="checkpoint to start from (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=160, help="steps to train for (default: %(default)s)")
    parser.add_argument("--summary", default=f"runs/{name}.json", help="file for the figures (default: %(default)s)")
    parser.add_argument("--save", default=f"runs/{name}", help="folder for the trained model (default: %(default)s)")
    return parser


def save_checkpoint(folder, **sizes):
    """Write an untrained model to ``folder``; ``sizes`` overrides entries of ``SIZES``."""
    config = Qwen3MoeConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **{**SIZES, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class PythonSource(Dataset):
    """Blocks of ``length`` bytes from the standard library's ``.py`` files. Every tenth file is held out.

    Args:
        length: bytes in a block.
        held_out: take the held-out files instead of the others.
    """

    def __init__(self, length, held_out=False):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        chosen = [file.read_bytes() for number, file in enumerate(files) if (number % 10 == 0) == held_out]
        self._text = torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8)
        self._length = length

    def __len__(self):
        return len(self._text) // self._length

    def __getitem__(self, index):
        block = self._text[index * self._length:(index + 1) * self._length].long()
        return {"input_ids": block, "labels": block}


def datasets(model):
    """Training blocks, and 128 held-out blocks spread evenly over the held-out files, for ``model``."""
    length = model.config.max_position_embeddings
    held_out = PythonSource(length, held_out=True)
    return PythonSource(length), Subset(held_out, range(0, len(held_out), -(-len(held_out) // 128)))


@torch.no_grad()
def mean_loss(model, batches, device):
    """Mean loss of ``model`` over ``batches``, which differ between ranks, and over the ranks."""
    model.eval()
    losses = [model(**{key: value.to(device) for key, value in batch.items()}).loss for batch in batches]
    model.train()
    total = torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(losses)), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


class ParameterWatch:
    """How many bytes of parameters this rank has in memory, for a ZeRO-3 ``model``.

    ``peak`` is the most that there was when any module was about to run: this rank's shards and what is gathered. A
    parameter that is not shared with other ranks needs no gathering: it is its own shard, and is counted once.
    """

    def __init__(self, model):
        self.peak = 0
        self._parameters = list(model.parameters())
        for module in model.modules():
            module.register_forward_pre_hook(self._look)

    def _look(self, module, inputs):
        tensors = [tensor for p in self._parameters for tensor in (p.ds_tensor, p.data)]
        self.peak = max(self.peak, sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()))

    @property
    def stored(self):
        """Bytes of the shards, which are there at all times."""
        return sum(p.ds_tensor.nbytes for p in self._parameters)


def expert_elements(model):
    """Elements of the expert parameters that this rank's model has when they are gathered, of all layers together."""
    return sum(p.ds_numel for name, p in model.named_parameters() if ".experts." in name)


def write_summary(path, model, losses, held_out, **of_this_rank):
    """Write the run's figures to a JSON file. Every rank must call this; rank 0 writes.

    Args:
        path: the file.
        model: the model that was trained.
        losses: rank 0's loss at each step.
        held_out: held-out loss before and after.
        **of_this_rank: more figures, which may differ between ranks.
    """
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {"expert_elements": expert_elements(model), **of_this_rank})
    if dist.get_rank() == 0:
        summary = {"losses": losses, "held_out": held_out, "ranks": ranks}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(summary, indent=1) + "\n")


@torch.no_grad()
def save_logits(engine, blocks, summary):
    """Write what the model says of the first of ``blocks`` next to the figures, to compare with after reloading."""
    engine.eval()
    logits = engine(input_ids=blocks[0]["input_ids"][None].to(engine.device)).logits
    if engine.global_rank == 0:
        torch.save(logits.cpu(), logits_file(summary))


def logits_file(summary):
    return Path(summary).with_suffix(".logits.pt")


if __name__ == "__main__":
    save_checkpoint(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT)
