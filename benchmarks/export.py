# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Time and host memory of saving a plain Hugging Face checkpoint, by all ranks and by rank 0: ``make bench-export``.

    python benchmarks/export.py [--shape small|qwen3-30b] [--device cpu|cuda] [--ranks 2 4] [--layers 8]

``all ranks`` is ``engine.save_hf_checkpoint`` with files of a quarter of a layer; ``rank 0`` consolidates the model
there, as the Trainer does, and calls ``save_pretrained``; ``ZeRO-3 alone`` does so without expert parallelism, which
is DeepSpeed's own code. Host memory is the growth of a process while it saves, the worst of the ranks, as a multiple
of the model's bytes. Ranks on cuda share one GPU through gloo.
"""
import os
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
from engines import ds_config  # noqa: E402
from host_memory import HostMemory  # noqa: E402
from init import SHAPES, argument_parser, environment_on, layer_bytes  # noqa: E402
from ranks import RankGroup  # noqa: E402

WAYS = ("all ranks", "rank 0", "ZeRO-3 alone")


def saved(way, layers, ranks, sizes, shard_bytes, folder):
    """Seconds and growth of this rank's host memory while a model of ``layers`` layers is saved."""
    import deepspeed
    import deepspeed.comm as dist
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = ds_config(None if way == "ZeRO-3 alone" else ranks, dtype="bf16", block={"reshard_bucket_bytes": 2**24})
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **sizes))
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    dist.barrier()
    memory, began = HostMemory(), time.perf_counter()
    memory.start()
    if way == "all ranks":
        engine.save_hf_checkpoint(folder, max_shard_size=shard_bytes)
    else:
        state = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state, max_shard_size=shard_bytes)
    dist.barrier()
    seconds = time.perf_counter() - began
    memory.stop()
    engine.destroy()
    return seconds, memory.growth


def main():
    parser = argument_parser(__doc__, ranks=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    table = Table("ranks", "way", "seconds", "host memory / model")
    for ranks in options.ranks:
        for way in WAYS:
            group = RankGroup(ranks, environment_on(options.device))
            with tempfile.TemporaryDirectory() as folder:
                seen = group.run(saved,
                                 way,
                                 options.layers,
                                 ranks,
                                 shape,
                                 layer_bytes(shape) // 4,
                                 folder,
                                 timeout=600)
            group.close()
            seconds, growth = map(max, zip(*seen))
            table.add_row(str(ranks), way, f"{seconds:.2f}", f"{growth / (options.layers * layer_bytes(shape)):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
