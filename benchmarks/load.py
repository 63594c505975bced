# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Time, memory and bytes read of ``from_pretrained`` under ZeRO-3 with experts spread: ``make bench-load``.

    python benchmarks/load.py [--shape small|qwen3-30b] [--device cpu|cuda] [--ranks 2 4] [--layers 8]

``each its part``: every rank reads its shards. ``rank 0``: the code of Transformers, by DS_AUTOEP_OFF=hf-import. The
checkpoint has a matrix per expert and files of a quarter of a layer, and is not in the page cache when loading begins.
Figures are the worst of the ranks: host memory is the growth of a process without mapped pages of files, device memory
what is held beside the shards, read what came from the disk.
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

WAYS = {"each its part": {}, "rank 0": {"DS_AUTOEP_OFF": "hf-import"}}


def made(layers, sizes, shard_bytes, folder):
    """Save a random model to ``folder``."""
    import deepspeed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = ds_config(1, dtype="bf16")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **sizes))
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    engine.save_hf_checkpoint(folder, max_shard_size=shard_bytes)
    engine.destroy()


def forget(folder):
    """Take the files out of the page cache; returns their bytes."""
    total = 0
    for name in os.listdir(folder):
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        total += os.fstat(descriptor).st_size
        os.close(descriptor)
    return total


def loaded(ranks, folder):
    """Seconds, growth of host and device memory, and bytes read on this rank."""
    import deepspeed.comm as dist
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(ds_config(ranks, dtype="bf16", block={"reshard_bucket_bytes": 2**24}))
    dist.barrier()
    memory, before, began = HostMemory(with_files=False), _bytes_read(), time.perf_counter()
    memory.start()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dist.barrier()
    seconds, device = time.perf_counter() - began, 0
    memory.stop()
    if torch.cuda.is_available():
        device = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del model, config
    return seconds, memory.growth, device, _bytes_read() - before


def _bytes_read():
    import psutil

    return psutil.Process().io_counters().read_bytes


def main():
    parser = argument_parser(__doc__, ranks=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    table = Table("ranks", "way", "seconds", "host memory / model", "device memory / layer", "read / files")
    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(2, environment_on(options.device))
        group.run(made, options.layers, shape, layer_bytes(shape) // 4, folder, timeout=600)
        group.close()
        for ranks in options.ranks:
            for way, environment in WAYS.items():
                size = forget(folder)
                group = RankGroup(ranks, {**environment_on(options.device), **environment})
                seconds, host, device, read = map(max, zip(*group.run(loaded, ranks, folder, timeout=600)))
                group.close()
                table.add_row(str(ranks), way, f"{seconds:.2f}", f"{host / size:.3f}",
                              f"{device / layer_bytes(shape):.3f}", f"{read / size:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
