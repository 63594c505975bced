# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The two ways to replace, on one model in one run: set-up memory and time, and the time of a training step.

    python benchmarks/ways.py [--shape small|qwen3-30b] [--device cpu|cuda] [--ranks 1 2] [--layers 2] [--tokens 1024]

``make bench-ways``. The experts only (Transformers' grouped_mm) is compared with DeepSpeed's whole blocks, in bf16
under ZeRO-3, EP = number of ranks. Transients are the worst of the ranks, in multiples of a layer's expert bytes; a
step is the median of rank 0. Ranks on cuda share one GPU through gloo, where only a ratio of steps means something.
"""
import os
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
from engines import ds_config  # noqa: E402
from init import SHAPES, argument_parser, environment_on, layer_bytes  # noqa: E402
from init_memory import measure  # noqa: E402
from ranks import RankGroup  # noqa: E402

WAYS = {"whole block": "qwen3_moe", "experts only": None}


def step_seconds(layers, ep, sizes, preset, tokens, device, steps=8):
    """Seconds of each training step (forward, backward, optimizer) after two that set things up."""
    import deepspeed
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = ds_config(ep, dtype="bf16", preset=preset)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(num_hidden_layers=layers, experts_implementation="grouped_mm", **sizes))
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    ids = torch.randint(sizes["vocab_size"], (1, tokens), device=engine.device)
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    engine.destroy()
    return seconds[2:]


def rows(options):
    shape = SHAPES[options.shape]
    for ranks in options.ranks:
        for way, preset in WAYS.items():
            group = RankGroup(ranks, environment_on(options.device))
            seen = group.run(measure, options.layers, ranks, shape, "bf16", options.device, False,
                             layer_bytes(shape) // 16, preset, timeout=600)  # yapf: disable
            step = group.run(step_seconds, options.layers, ranks, shape, preset, options.tokens, options.device,
                             timeout=600)[0]  # yapf: disable
            group.close()
            yield ranks, way, max(rank["replace"] for rank in seen), max(rank["seconds"] for rank in seen), step


def main():
    parser = argument_parser(__doc__, ranks=[1, 2])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="per rank and step")
    options = parser.parse_args()
    table = Table("ranks", "way", "replace / layer", "set-up s", "step ms (median, range)")
    layer = layer_bytes(SHAPES[options.shape])
    for ranks, way, replace, setup, step in rows(options):
        spread = f"{statistics.median(step) * 1e3:.1f} ({min(step) * 1e3:.1f} to {max(step) * 1e3:.1f})"
        table.add_row(str(ranks), way, f"{replace / layer:.3f}", f"{setup:.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
