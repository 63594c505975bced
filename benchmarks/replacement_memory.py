# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Memory of layer replacement with and without the overlay's extensions, on 4 CPU ranks: ``make bench-replacement``.

All figures are per rank, the worst of the four ranks; bytes are multiples of one layer's expert bytes.
"""
import os
import sys

import deepspeed
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
from ranks import RankGroup  # noqa: E402
from replacement_memory import LAYER_BYTES, measure  # noqa: E402

CASES = {"without": {"DS_AUTOEP_OFF": "debug-name-tables,partitioned-experts"}, "with": {}}


def main():
    table = Table(title=f"DeepSpeed {deepspeed.__version__}, N=4, {LAYER_BYTES / 2**10:.0f} KiB of experts a layer")
    for column in ("EP", "layers", "overlay", "peak", "experts still whole", "source alive after replacement",
                   "source alive after init"):  # yapf: disable
        table.add_column(column, justify="right")
    for ep in (1, 2, 4):
        for layers in (2, 8):
            for name, environment in CASES.items():
                group = RankGroup(4, environment)
                seen = group.run(measure, layers, ep)
                group.close()
                worst = {key: max(rank[key] for rank in seen) for key in seen[0]}
                table.add_row(str(ep), str(layers), name, f"{worst['peak'] / LAYER_BYTES:.2f}",
                              f"{4 * worst['unpartitioned'] / LAYER_BYTES:.2f}",
                              f"{worst['alive_after_replacement']:.0%}", f"{worst['alive_after_init']:.0%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
