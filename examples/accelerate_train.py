# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The same training through Accelerate, whose launcher names DeepSpeed's configuration.

    python examples/tiny_moe.py runs/tiny_moe
    accelerate launch --config_file examples/accelerate_zero3.yaml examples/accelerate_train.py --model runs/tiny_moe
"""
import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tiny_moe import argument_parser, datasets, mean_loss, write_summary


def main():
    args = argument_parser("accelerate").parse_args()
    # Without a GPU Accelerate chooses no backend, and each rank would take itself for the only one.
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    blocks, held_out_blocks = datasets(model)
    batches = DataLoader(blocks, batch_size=4, shuffle=True)
    held_out = DataLoader(held_out_blocks, batch_size=4)
    # The optimizer is the one of the DeepSpeed configuration.
    model, optimizer, batches, held_out = accelerator.prepare(model, DummyOptim(model.parameters()), batches, held_out)

    before, losses = mean_loss(model, held_out, accelerator.device), []
    for step, batch in enumerate(itertools.islice(batches, args.steps), start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step}/{args.steps} loss {losses[-1]:.3f}")
    after = mean_loss(model, held_out, accelerator.device)
    accelerator.print(f"held-out loss {before:.3f} before, {after:.3f} after; figures in {args.summary}")
    write_summary(args.summary, model.module, losses, [before, after])
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.save, state_dict=weights)
    accelerator.wait_for_everyone()  # no rank leaves while another still talks to it
    accelerator.end_training()


if __name__ == "__main__":
    main()
