# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Tables and plot of what ``benchmarks/block.py`` measured, also of a run that was stopped before its end.

    python benchmarks/block_report.py FILE.json [--plot docs/performance.png]
"""
import argparse
import json
import statistics

from rich.console import Console
from rich.table import Table


def flops(shape, tokens):
    """Of forward and backward: three products of 2 R H F each forward, twice that backward."""
    return 18 * tokens * shape["K"] * shape["H"] * shape["F"]


def least_bytes(shape, tokens):
    """What the six GEMMs read and write when each operand moves once, bf16."""
    rows = tokens * shape["K"]
    return 2 * (9 * shape["E"] * shape["H"] * shape["F"] + rows * (6 * shape["H"] + 9 * shape["F"]))


def median(record, key="both"):
    return statistics.median(record[key])


def point_of(record):
    return record["shape"], record["routing"], record["tokens"]


class Run:
    """The records of one run and what they are compared with: the floor, and the contender's own even routing."""

    def __init__(self, saved):
        self.shapes, self.records, self.tolerance = saved["shapes"], saved["records"], saved["tolerance"]
        self.checked, self.notes, self.seed = saved["checked"], saved["notes"], saved["seed"]
        self.timed = [record for record in self.records if "tokens" in record]
        self.medians = {(record["contender"], *point_of(record)): median(record)
                        for record in self.timed if "both" in record}  # yapf: disable
        self.points = list(dict.fromkeys(point_of(record) for record in self.timed))

    def over_floor(self, record):
        """Time over the floor's at the same point; None where the floor was not measured."""
        floor = self.medians.get(("floor", *point_of(record)))
        return median(record) / floor if floor else None

    def over_even(self, record):
        """Time over the contender's own at even routing, which has as many routed rows."""
        even = self.medians.get((record["contender"], record["shape"], "even", record["tokens"]))
        return median(record) / even if even else None


def print_errors(console, run):
    title = f"relative error against float64, up to {run.checked} tokens (over {run.tolerance}: !)"
    compared = [record for record in run.records if "errors" in record]
    names = list(compared[0]["errors"]) if compared else []
    table = Table("contender", "shape", "routing", *names, title=title)
    for record in compared:
        seen = [f"{value:.1e}" + ("" if value <= run.tolerance else " !") for value in record["errors"].values()]
        table.add_row(record["contender"], record["shape"], record["routing"], *seen)
    console.print(table)


def print_times(console, run):
    table = Table("shape", "T", "routing", "contender", "ms", "p10 to p90", "x floor", "x even", "TF/s", "forward ms",
                  "peak GiB", "held GiB", title="forward and backward, medians")  # yapf: disable
    for record in sorted(run.timed, key=lambda record: run.points.index(point_of(record))):
        shape, routing, tokens = point_of(record)
        row = [shape, f"{tokens:,}", routing, record["contender"]]
        if "failed" in record:
            table.add_row(*row, record["failed"])
            continue
        tenths = statistics.quantiles(record["both"], n=10)
        table.add_row(*row, f"{median(record):.2f}", f"{tenths[0]:.2f} to {tenths[-1]:.2f}",
                      *(f"{ratio:.2f}" if ratio else "-" for ratio in (run.over_floor(record), run.over_even(record))),
                      f"{flops(run.shapes[shape], tokens) / median(record) / 1e9:,.0f}",
                      f"{median(record, 'forward'):.2f}",
                      *(f"{record[key] / 2**30:.2f}" if key in record else "-"
                        for key in ("peak", "held")))  # yapf: disable
    console.print(table)
    for shape, routing, tokens in run.points:
        floor = run.medians.get(("floor", shape, routing, tokens))
        if floor and routing == run.points[0][1]:
            work, moved = flops(run.shapes[shape], tokens), least_bytes(run.shapes[shape], tokens)
            console.print(f"{shape}, T={tokens:,}: {work / 1e12:.2f} TFLOP, {moved / 1e9:.2f} GB at least, "
                          f"{work / moved:,.0f} FLOP a byte; the floor does {work / floor / 1e9:,.0f} TF/s and moves "
                          f"{moved / floor / 1e6:,.0f} GB/s")


def report(saved, console=None):
    """Print the tables of ``saved``, a dictionary as in the file of ``--json``."""
    run, console = Run(saved), console or Console(width=150)
    if run.timed:
        print_errors(console, run)
        print_times(console, run)
    for record in run.records:
        if "skipped" in record:
            where = f", {record['shape']}" if "shape" in record else ""
            console.print(f"{record['contender']}{where}: not measured, {record['skipped']}", markup=False)
    for name, note in run.notes.items():
        console.print(f"{name}: {note}", markup=False)
    console.print(f"seed {run.seed}")


def plot(saved, path):
    """Ratio to the floor over the number of tokens, a panel for each shape, the first routing."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = Run(saved)
    shapes = list(dict.fromkeys(shape for shape, _, _ in run.points))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(4.5 * len(shapes), 4), squeeze=False)
    seen = [record for record in run.timed if "both" in record and record["routing"] == run.points[0][1]]
    for axes, shape in zip(panels[0], shapes):
        for name in dict.fromkeys(record["contender"] for record in seen):
            points = [(record["tokens"], run.over_floor(record)) for record in seen
                      if record["contender"] == name and record["shape"] == shape and run.over_floor(record)]
            if name != "floor" and points:
                axes.loglog(*zip(*sorted(points)), "o-", label=name)
        axes.axhline(1, color="black", linewidth=1)
        ticks = sorted({tokens for of, _, tokens in run.points if of == shape})
        heights = [1, 1.25, 1.5, 2, 3, 4, 6, 8]
        axes.set(title=shape, xlabel="tokens", xticks=ticks, xticklabels=ticks, yticks=heights, yticklabels=heights)
        axes.minorticks_off()
    panels[0][0].set_ylabel("time / six grouped GEMMs")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="written by block.py --json")
    parser.add_argument("--plot", help="file for a plot of the ratio to the floor over the number of tokens")
    options = parser.parse_args()
    with open(options.file) as file:
        saved = json.load(file)
    report(saved)
    if options.plot:
        plot(saved, options.plot)


if __name__ == "__main__":
    main()
