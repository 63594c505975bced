# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory in which one rank plans the moves of one layer, by shapes of public models: ``make bench-plan``.

The worst of a few ranks, for every EP degree that divides ranks and experts; nothing is moved.
"""
import os
import sys
import time
import tracemalloc

from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
from expert_layouts import layout_of  # noqa: E402
from reshard_plans import MODELS, degrees, grid, plan_of  # noqa: E402

LAYOUTS = ("fused", "transposed", "module_list")


def planned(kind, sizes, world, ep, rank):
    plan = plan_of(layout_of(kind, *sizes), world, grid(world, ep))
    return plan.received(rank), plan.sent(rank)


def measured(*case):
    """CPU seconds without, and peak bytes with, the tracing of allocations."""
    begin = time.process_time()
    planned(*case)
    seconds = time.process_time() - begin
    tracemalloc.start()
    planned(*case)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def main():
    table = Table(title="one rank, one layer; the worst of all EP degrees")
    for column in ("model", "source", "N", "EP degrees", "ms", "MB"):
        table.add_column(column, justify="right")
    for model, sizes in MODELS.items():
        for kind in LAYOUTS:
            for world in (64, 256, 1024):
                eps = degrees(sizes[0], world)
                seen = [measured(kind, sizes, world, ep, rank) for ep in eps for rank in (0, world // 2 + 1)]
                seconds, peak = map(max, zip(*seen))
                table.add_row(model, kind, str(world), ", ".join(map(str, eps)), f"{1e3 * seconds:.1f}",
                              f"{peak / 1e6:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
