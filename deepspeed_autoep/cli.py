# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The command line ``ds_autoep``."""
import argparse
import json
import sys
from dataclasses import asdict, fields

from deepspeed_autoep import __version__
from deepspeed_autoep import estimate as memory
from deepspeed_autoep import family_matrix
from deepspeed_autoep.extension import State
from deepspeed_autoep.finder import installed_finders
from deepspeed_autoep.model_sizes import EstimateError, read_model

_COLOURS = {State.APPLIED: "green", State.UPSTREAM: "cyan", State.OFF: "yellow", State.DRIFT: "red"}


def _console():
    from rich.console import Console

    # A table cut off at the width of a pipe would hide the names that it is for.
    return Console(width=None if sys.stdout.isatty() else 160)


def status(arguments) -> int:
    """Print what became of every extension; the exit status is 1 when one, or ``DS_AUTOEP_OFF``, does not fit."""
    from rich.markup import escape
    from rich.table import Table

    from deepspeed_autoep.overlay import unknown_features

    console = _console()
    overlays = [finder.overlay for finder in installed_finders()]
    if not overlays:
        console.print("The overlay is off (DS_AUTOEP=0): DeepSpeed is as installed.")
        return 0
    for overlay in overlays:
        overlay.load_all()
    releases = ", ".join(f"{overlay.package} {overlay.found_version}" for overlay in overlays)
    table = Table(title=f"deepspeed-autoep {__version__} on {releases}")
    for column in ("feature", "extends", "state", "why"):
        table.add_column(column, overflow="fold")
    extensions = [e for overlay in overlays for e in overlay.extensions]
    for e in sorted(extensions, key=lambda e: (e.feature, e.name)):
        why = e.why if e.state is State.APPLIED else f"{e.reason} ({e.why})"
        table.add_row(e.feature, e.name, f"[{_COLOURS[e.state]}]{e.state.value}[/]", escape(why))
    console.print(table)
    console.print(f"Experts are computed by {_experts_computed_by()}.")
    unknown = unknown_features(overlays)
    if unknown:
        console.print(escape(unknown))
    return 1 if unknown or any(e.state is State.DRIFT for e in extensions) else 0


def _experts_computed_by():
    from deepspeed.moe.kernel_choice import why_no_grouped_gemm

    why_not = why_no_grouped_gemm()
    return "grouped GEMMs and kernels" if why_not is None else f"the family's own forward: {why_not}"


def estimate(arguments) -> int:
    """Print memory per rank for each EP degree.

    The exit status is 1 when ``--memory`` is given and no degree fits, 2 when the question cannot be answered.
    """
    try:
        asked = {field.name: getattr(arguments, field.name) for field in fields(memory.Settings)}
        settings = memory.Settings(**asked)
        model = read_model(arguments.model)
        degrees = memory.allowed_ep_degrees(model, settings.ranks) if arguments.ep is None else [arguments.ep]
        estimates = [memory.estimate(model, settings, ep) for ep in degrees]
    except EstimateError as error:
        print(f"ds_autoep estimate: {error}", file=sys.stderr)
        return 2
    fits = [None if arguments.memory is None else e.peak <= arguments.memory * memory.GIB for e in estimates]
    if arguments.json:
        rows = [{**asdict(e), "peak": e.peak, "fits": fit} for e, fit in zip(estimates, fits)]
        print(json.dumps({"model": arguments.model, "parameters": model.numel, **asked, "estimates": rows}, indent=2))
    else:
        title = f"{arguments.model}, {model.numel / 1e9:.1f}e9 parameters, N={settings.ranks}, ZeRO-{settings.zero}, "
        _print_estimates(f"{title}{settings.optimizer}, {settings.dtype}: GiB per rank", estimates, fits)
    return 1 if fits and not any(fit is not False for fit in fits) else 0


def _print_estimates(title, estimates, fits):
    from rich.table import Table

    table = Table(title=title)
    columns = ["weights", "gradients", "optimizer", "buffers", "gathered", "backward", "step", "construct", "replace",
               "peak", "saved", "host"]  # yapf: disable
    for column in ("EP", *columns, "fits"):
        table.add_column(column, justify="right")
    for e, fit in zip(estimates, fits):
        sizes = [f"{getattr(e, column) / memory.GIB:.2f}" for column in columns]
        table.add_row(str(e.ep), *sizes, {None: "", True: "yes", False: "no"}[fit])
    _console().print(table)


def export(arguments) -> int:
    """Write a plain Hugging Face checkpoint from a DeepSpeed one; the exit status is 2 when that is not possible."""
    if not installed_finders():
        print("ds_autoep export: found DS_AUTOEP=0; allowed: leaving it unset", file=sys.stderr)
        return 2
    from deepspeed.checkpoint.zero3_export import DTYPES, export_checkpoint

    try:
        files = export_checkpoint(arguments.checkpoint_dir, arguments.output_dir, arguments.model, arguments.tag,
                                  DTYPES.get(arguments.dtype), arguments.max_shard_size, arguments.trust_remote_code)
    except (ValueError, OSError) as error:
        print(f"ds_autoep export: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output_dir}: {len(files)} file{'s' if len(files) > 1 else ''} of weights")
    return 0


def families(arguments) -> int:
    """Print which model families work, as tested; the exit status is 2 when the record of it cannot be read."""
    try:
        matrix = family_matrix.read()
    except family_matrix.MatrixError as error:
        print(f"ds_autoep families: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(family_matrix.dumps(matrix), end="")
    else:
        _print_families(matrix)
    return 0


def _print_families(matrix):
    from rich.markup import escape
    from rich.table import Table

    works = Table()
    works.add_column("family", overflow="fold")
    for column in ("experts modules", *[f"{kind} error" for kind in family_matrix.ERRORS]):
        works.add_column(column, justify="right")
    for name, found in matrix["families"].items():
        errors = [f"{found[kind]:.0g}" for kind in family_matrix.ERRORS]
        works.add_row(name, str(found["experts"]), *errors)
    refused = Table()
    for column in ("refused", "why"):
        refused.add_column(column, overflow="fold")
    for name, reason in matrix["refused"].items():
        refused.add_row(name, escape(reason))
    _console().print(family_matrix.summary(matrix), works, refused, sep="\n", highlight=False)


def _add_families(commands):
    parser = commands.add_parser("families", help="list model families that work, as tested, and those that cannot")
    parser.add_argument("--json", action="store_true", help="print the record of the test run")


def _add_export(commands):
    parser = commands.add_parser("export", help="a plain Hugging Face checkpoint from a DeepSpeed ZeRO-3 checkpoint, "
                                 "in one process without an accelerator")  # yapf: disable
    parser.add_argument("checkpoint_dir", metavar="CHECKPOINT_DIR", help="folder that was given to save_checkpoint")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder for the files")
    parser.add_argument("--model", required=True, help="folder or Hub name of the model that was trained: "
                        "configuration, generation configuration and tokenizer are taken from there")  # yapf: disable
    parser.add_argument("--tag", help="which checkpoint, as global_step10 (default: what latest names)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bf16", "fp16"), default="auto",
                        help="of the parameters (default: what the model's configuration says)")  # yapf: disable
    parser.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help="of one file (default %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def _add_estimate(commands):
    parser = commands.add_parser("estimate",
                                 help="memory per rank of a model, for each EP degree, from its config.json")
    parser.add_argument("model", metavar="CONFIG_OR_MODEL_DIR", help="a config.json, or a directory that holds one")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--ep", type=int, metavar="K", help="only this EP degree; all possible ones if left out")
    parser.add_argument("--zero", type=int, choices=range(4), default=3, help="ZeRO stage (default 3)")
    parser.add_argument("--optimizer", choices=memory.MOMENTS, default="adamw")
    parser.add_argument("--offload", choices=memory.OFFLOADS, default="none", help="what is kept in host memory")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a device, to say what fits")
    parser.add_argument("--dtype", choices=memory.DTYPE_BYTES, default="bf16")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    parser.add_argument("--bucket", dest="reshard_bucket_bytes", type=int, metavar="BYTES",
                        default=memory.Settings.reshard_bucket_bytes,
                        help="expert_parallel.reshard_bucket_bytes (default %(default)s)")  # yapf: disable
    for key in ("param_persistence_threshold", "reduce_bucket_size", "prefetch_bucket_size", "max_reuse_distance",
                "sub_group_size"):  # yapf: disable
        parser.add_argument(f"--{key.replace('_', '-')}",
                            type=int,
                            metavar="ELEMENTS",
                            default=getattr(memory.Settings, key),
                            help="of zero_optimization (default %(default)s)")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="ds_autoep", description="Expert parallelism x ZeRO-3 for DeepSpeed.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="list every extension of DeepSpeed: applied, already upstream, off or misfit")
    _add_estimate(commands)
    _add_families(commands)
    _add_export(commands)
    arguments = parser.parse_args(argv)
    run = {"status": status, "estimate": estimate, "families": families, "export": export}[arguments.command]
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
