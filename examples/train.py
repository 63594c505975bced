# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Train with DeepSpeed alone. Expert parallelism is nothing but a block in the JSON file: the script is as ever.

    python examples/tiny_moe.py runs/tiny_moe
    torchrun --nproc-per-node 2 examples/train.py --model runs/tiny_moe

On a machine without a GPU set DS_ACCELERATOR=cpu and LOCAL_SIZE=2, the number of ranks that share it.
"""
import itertools
import json
import time

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from tiny_moe import ParameterWatch, argument_parser, datasets, mean_loss, save_logits, write_summary


def train(engine, batches, steps):
    """Train for ``steps`` steps. Returns the losses and the seconds that each step took."""
    losses, seconds = [], []
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        start = time.perf_counter()
        loss = engine(**{key: value.to(engine.device) for key, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if engine.global_rank == 0:
            print(f"step {step}/{steps} loss {losses[-1]:.3f}", flush=True)
    return losses, seconds


def main():
    parser = argument_parser("train")
    parser.add_argument("--config", default="examples/ds_zero3_ep.json", help="DeepSpeed's configuration")
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    deepspeed.init_distributed()
    torch.manual_seed(0)

    zero3 = HfDeepSpeedConfig(config)  # while this lives, from_pretrained loads each rank's part only
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    blocks, held_out_blocks = datasets(model)
    engine, _, batches, _ = deepspeed.initialize(model=model,
                                                 model_parameters=model.parameters(),
                                                 training_data=blocks,
                                                 config=zero3.config)
    held_out = DataLoader(held_out_blocks,
                          batch_size=engine.train_micro_batch_size_per_gpu(),
                          sampler=DistributedSampler(held_out_blocks, shuffle=False))

    watch = ParameterWatch(engine.module)
    before = mean_loss(engine, held_out, engine.device)
    losses, seconds = train(engine, batches, args.steps)
    after = mean_loss(engine, held_out, engine.device)

    tokens = engine.train_micro_batch_size_per_gpu() * model.config.max_position_embeddings
    steady = sorted(seconds)[len(seconds) // 2]  # the median: the first steps also set things up
    write_summary(args.summary,
                  engine.module,
                  losses, [before, after],
                  tokens_per_second=tokens / steady,
                  parameter_bytes_stored=watch.stored,
                  parameter_bytes_peak=watch.peak)
    if engine.global_rank == 0:
        print(f"held-out loss {before:.3f} before, {after:.3f} after; figures in {args.summary}")
    engine.save_hf_checkpoint(args.save)
    save_logits(engine, held_out_blocks, args.summary)
    engine.destroy()
    deepspeed.comm.barrier()  # no rank leaves while another still talks to it
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
