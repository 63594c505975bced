# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/memory.md, as Markdown: ``make bench-memory``. Each row is one run of ``ds_autoep estimate``.

    python benchmarks/memory_table.py [--memory 80]

The configurations in benchmarks/configs/ have the keys of the published config.json files that decide sizes.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

from deepspeed_autoep.estimate import GIB

CONFIGS = Path(__file__).parent / "configs"
# Model -> (name in the table, number of ranks).
MODELS = {
    "deepseek-v3": ("DeepSeek-V3", 256),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", 64),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", 16),
    "mixtral-8x22b": ("Mixtral-8x22B", 64),
    "glm-4.5-air": ("GLM-4.5-Air", 32),
    "gpt-oss-120b": ("gpt-oss-120b", 32),
}
EP_DEGREES = (1, 8)
COLUMNS = ("weights", "gradients", "optimizer", "gathered", "backward", "step", "construct", "replace", "peak",
           "saved")


def answers(model, ranks, memory):
    """What the command prints for one model, for each of EP_DEGREES; raises CalledProcessError when it refuses."""
    for ep in EP_DEGREES:
        done = subprocess.run([sys.executable, "-m", "deepspeed_autoep.cli", "estimate", CONFIGS / f"{model}.json",
                               "--ranks", str(ranks), "--ep", str(ep), "--memory", str(memory), "--json"],
                              stdout=subprocess.PIPE)  # yapf: disable
        if done.returncode not in (0, 1):  # 1: it does not fit
            done.check_returncode()
        answer = json.loads(done.stdout)
        yield answer["parameters"], answer["estimates"][0]


def row(*cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=float, default=80, help="GiB of a device (default 80)")
    options = parser.parse_args()
    row("model", "parameters", "N", "EP", *COLUMNS, f"fits {options.memory:g} GiB")
    row("---", *["--:"] * (len(COLUMNS) + 4))
    for model, (name, ranks) in MODELS.items():
        for numel, found in answers(model, ranks, options.memory):
            sizes = [f"{found[column] / GIB:.2f}" for column in COLUMNS]
            row(name, f"{numel / 1e9:.1f}e9", str(ranks), str(found["ep"]), *sizes, "yes" if found["fits"] else "no")


if __name__ == "__main__":
    main()
