# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The command line ``ds_autoep``."""
import argparse
import sys

from deepspeed_autoep import __version__
from deepspeed_autoep.extension import State
from deepspeed_autoep.finder import installed_finder

_COLOURS = {State.APPLIED: "green", State.UPSTREAM: "cyan", State.OFF: "yellow", State.DRIFT: "red"}


def status() -> int:
    """Print what became of every extension; the exit status is 1 when one does not fit."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A table cut off at the width of a pipe would hide the names that it is for.
    console = Console(width=None if sys.stdout.isatty() else 160)
    finder = installed_finder()
    if finder is None:
        console.print("The overlay is off (DS_AUTOEP=0): DeepSpeed is as installed.")
        return 0
    overlay = finder.overlay
    overlay.load_all()
    table = Table(title=f"deepspeed-autoep {__version__} on {overlay.package} {overlay.found_version}")
    for column in ("feature", "extends", "state", "why"):
        table.add_column(column, overflow="fold")
    for e in sorted(overlay.extensions, key=lambda e: (e.feature, e.name)):
        why = e.why if e.state is State.APPLIED else f"{e.reason} ({e.why})"
        table.add_row(e.feature, e.name, f"[{_COLOURS[e.state]}]{e.state.value}[/]", escape(why))
    console.print(table)
    return 1 if any(e.state is State.DRIFT for e in overlay.extensions) else 0


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="ds_autoep", description="Expert parallelism x ZeRO-3 for DeepSpeed.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="list every extension of DeepSpeed: applied, already upstream, off or misfit")
    arguments = parser.parse_args(argv)
    return {"status": status}[arguments.command]()


if __name__ == "__main__":
    sys.exit(main())
