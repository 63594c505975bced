# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of setting up AutoEP under ZeRO-3, with the overlay and as DeepSpeed does it: ``make bench-init``.

    python benchmarks/init.py [--shape small|qwen3-30b] [--device cpu|cuda] [--ranks 2 4] [--ep 1 2 4]
                              [--layers 2] [--plot FILE.png]

Figures are per rank, the worst of the ranks. Bytes are above those that are left when the phase is over, as multiples
of one layer's expert bytes; times N they show what falls as 1/N. ``construct`` builds the model under zero.Init,
``replace`` is what deepspeed.initialize does to its layers. Ranks on cuda share one GPU through gloo.
"""
import argparse
import os
import sys

import deepspeed
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
from init_memory import measure  # noqa: E402
from ranks import RankGroup  # noqa: E402

# The rest of the model is as small as it gets, so that experts are all there is to see.
REST = dict(vocab_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=8)
SHAPES = {
    "small": dict(num_experts=16, hidden_size=256, moe_intermediate_size=128, **REST),
    "qwen3-30b": dict(num_experts=128, hidden_size=2048, moe_intermediate_size=768, **REST),
}
OVERLAY = {"DeepSpeed": "debug-name-tables,partitioned-experts,unfilled-experts", "overlay": ""}


def layer_bytes(shape):
    return 2 * 3 * shape["num_experts"] * shape["hidden_size"] * shape["moe_intermediate_size"]  # bf16


def argument_parser(description, ranks):
    """The options of every benchmark that starts groups of ``ranks`` (the default) on models of ``SHAPES``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    return parser


def environment_on(device):
    """What ranks need in their environment to run on ``device``; on cuda they share one GPU."""
    return {"DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0"} if device == "cuda" else {}


def worst(ranks, ep, layers, who, options):
    """The largest of each figure over the ranks, all of one kind of set-up."""
    shape = SHAPES[options.shape]
    group = RankGroup(ranks, {"DS_AUTOEP_OFF": OVERLAY[who], **environment_on(options.device)})
    seen = group.run(measure, layers, ep, shape, "bf16", options.device, False, layer_bytes(shape) // 16, timeout=600)
    group.close()
    return {key: max(rank[key] for rank in seen) for key in seen[0]}


def rows(options):
    for ranks in options.ranks:
        for ep in [degree for degree in options.ep if ranks % degree == 0]:
            for layers in options.layers:
                for who in OVERLAY:
                    yield ranks, ep, layers, who, worst(ranks, ep, layers, who, options)


def plot(measured, layer, path):
    """Replace transient over the number of ranks, both axes logarithmic, with a line of slope -1."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for who, marker in zip(OVERLAY, "sx"):
        points = [(ranks, seen["replace"] / layer) for ranks, _, _, by, seen in measured if by == who]
        axes.loglog(*zip(*points), marker, label=who)
    degrees = sorted({ranks for ranks, *_ in measured})
    axes.loglog(degrees, [1 / ranks + 1 / 16 for ranks in degrees], "-", label="layer / N + bucket (layer / 16)")
    axes.set(xlabel="ranks, N", ylabel="replace transient / layer", xticks=degrees, xticklabels=degrees)
    axes.minorticks_off()
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argument_parser(__doc__, ranks=[4])
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--plot", help="file for a plot of the replace transient over the number of ranks")
    options = parser.parse_args()
    layer = layer_bytes(SHAPES[options.shape])
    table = Table(title=f"DeepSpeed {deepspeed.__version__}, {options.shape}, {options.device}: {layer / 2**20:,.0f} "
                  "MiB of experts a layer (bf16), bucket layer / 16")
    for column in ("N", "EP", "layers", "set up by", "construct", "replace", "replace x N", "received / (layer / N)",
                   "s", "source alive"):  # yapf: disable
        table.add_column(column, justify="right")
    measured = []
    for ranks, ep, layers, who, seen in rows(options):
        measured.append((ranks, ep, layers, who, seen))
        received = seen["received"] / layers / layer * ranks
        table.add_row(str(ranks), str(ep), str(layers), who, f"{seen['construct'] / layer:.3f}",
                      f"{seen['replace'] / layer:.3f}", f"{ranks * seen['replace'] / layer:.2f}",
                      f"{received:.3f}" if received else "-", f"{seen['seconds']:.2f}",
                      f"{seen['alive_after_replacement']:.0%}")  # yapf: disable
        print(f"N={ranks} EP={ep} layers={layers} {who}: done", file=sys.stderr, flush=True)
    Console(width=130).print(table)
    if options.plot:
        plot(measured, layer, options.plot)


if __name__ == "__main__":
    main()
