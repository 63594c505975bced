# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``make demo``: shows on any machine, without a GPU, what expert parallelism changes about a ZeRO-3 run.

It trains a small MoE model on two CPU ranks with ``train.py``, repeats a few steps without the ``expert_parallel``
block, and compares the two. Everything that it writes is in ``runs/demo``.
"""
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

RANKS = 2
EXPERT_PARALLEL, ZERO3_ALONE = "ZeRO-3 + expert parallel", "ZeRO-3 alone"
STEPS, STEPS_TO_COMPARE = 150, 10
HERE = Path(__file__).resolve().parent
RUNS = Path("runs/demo")
CHECKPOINT = RUNS / "checkpoint"
CURVE = RUNS / "loss.png"
STEP_LINE = re.compile(r"step (\d+)/\d+ loss (\S+)")
console = Console(highlight=False)


def environment():
    """The environment of the ranks: the CPU and its cores shared among them, no warnings of the libraries."""
    return {
        # By release: DeepSpeed loads an extension that another release of it built, and fails.
        "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions", version("deepspeed")),
        "LOCAL_SIZE": str(RANKS),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS)),
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        # DeepSpeed builds a C++ extension with the ninja that was installed next to this Python.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def exit_if_failed(process, log):
    """Show the end of what a failed ``process`` printed to ``log``, and give up."""
    if process.returncode != 0:
        lines = log.read_text().splitlines(keepends=True)
        of_ranks = [line for line in lines if line.startswith("[rank")]  # the launcher says more, but not why
        sys.stderr.writelines((of_ranks or lines)[-30:])
        sys.exit(f"Failed with status {process.returncode}; all of its output is in {log}")


def write_checkpoint():
    """Write the untrained model, in a process of its own: it takes seconds to import what makes it."""
    run_script("tiny_moe.py", RUNS / "checkpoint.log", CHECKPOINT)


def run_script(name, log, *options):
    """Run an example to its end; what it prints goes to the file ``log``."""
    with open(log, "w") as file:
        process = subprocess.run([sys.executable, HERE / name, *options], env=environment(), stdout=file,
                                 stderr=subprocess.STDOUT)  # yapf: disable
    exit_if_failed(process, log)


def reload(config):
    """Load the model that was trained, with Transformers alone; return what that says of it."""
    log, summary = RUNS / "use_model.log", RUNS / f"{config.stem}.figures.json"
    run_script("use_model.py", log, f"--save={RUNS / config.stem}", f"--summary={summary}")
    return [line for line in log.read_text().splitlines() if line.startswith(("largest difference", "a line of code"))]


def train(title, config, steps):
    """Run ``train.py`` behind a progress bar and return its figures; what it prints goes to a log file."""
    log, summary = config.with_suffix(".log"), RUNS / f"{config.stem}.figures.json"
    options = [f"--model={CHECKPOINT}", f"--config={config}", f"--steps={steps}", f"--summary={summary}",
               f"--save={RUNS / config.stem}"]  # yapf: disable
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    columns = (SpinnerColumn(), TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.fields[state]}"),
               TimeElapsedColumn())
    with open(log, "w") as file, Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, state=f"starting {RANKS} ranks")
        with subprocess.Popen([*command, HERE / "train.py", *options], env=environment(), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # yapf: disable
            for line in process.stdout:
                file.write(line)
                if step := STEP_LINE.match(line):
                    state = f"step {step[1]}/{steps}  loss {step[2]}"
                    progress.update(task, total=steps, completed=int(step[1]), state=state)
    exit_if_failed(process, log)
    return json.loads(summary.read_text())


def write_configurations():
    """Write the examples' configuration with and without its expert_parallel block; return both paths."""
    config = json.loads((HERE / "ds_zero3_ep.json").read_text())
    # ZeRO-3's default limits fit models of billions of parameters: it would keep all of this one gathered.
    for limit in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"):
        config["zero_optimization"][limit] = 1_000_000
    paths = RUNS / "ds_zero3_ep.json", RUNS / "ds_zero3.json"
    paths[0].write_text(json.dumps(config, indent=2) + "\n")
    del config["expert_parallel"]
    paths[1].write_text(json.dumps(config, indent=2) + "\n")
    return paths


def draw(run):
    """Draw the loss curve."""
    losses = run["losses"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, label="training, at each step")
    axes.plot([0, len(losses)], run["held_out"], "o", color="black", label="held-out files, before and after")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Qwen3-MoE, ZeRO-3 x expert parallelism on two ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(CURVE, dpi=150)


def figures(run):
    """What the table says of a run. Losses and bytes are those of rank 0; the ranks' speeds are added up."""
    first, losses = run["ranks"][0], dict(enumerate(run["losses"], start=1))
    return {
        **{f"training loss, step {step}": f"{losses[step]:.3f}" if step in losses else "-"
           for step in (1, STEPS_TO_COMPARE, STEPS)},
        "held-out loss before": f"{run['held_out'][0]:.3f}",
        f"held-out loss after step {STEPS}": f"{run['held_out'][1]:.3f}" if STEPS in losses else "-",
        "tokens per second": f"{sum(rank['tokens_per_second'] for rank in run['ranks']):,.0f}",
        "parameters on a rank, stored": f"{first['parameter_bytes_stored'] / 1e6:.1f} MB",
        "parameters on a rank, peak in memory": f"{first['parameter_bytes_peak'] / 1e6:.1f} MB",
    }  # yapf: disable


def comparison(trained, plain):
    table = Table(title=f"The same model and script on {RANKS} ranks")
    for column, justify in (("", "left"), (EXPERT_PARALLEL, "right"), (ZERO3_ALONE, "right")):
        table.add_column(column, justify=justify)
    ours, theirs = figures(trained), figures(plain)
    for name in ours:
        table.add_row(name, ours[name], theirs[name])
    return table


def main():
    RUNS.mkdir(parents=True, exist_ok=True)
    console.print(f"""
A small Qwen3-MoE learns Python, byte by byte, from the source of the standard
library: {RANKS} CPU ranks, half of every layer's experts on each. It takes two to
four minutes, and one more when DeepSpeed first builds a C++ extension.
""")
    write_checkpoint()
    expert_config, plain_config = write_configurations()
    spread = train(EXPERT_PARALLEL, expert_config, STEPS)
    alone = train(ZERO3_ALONE, plain_config, STEPS_TO_COMPARE)
    draw(spread)
    reloaded = reload(expert_config)
    console.print()
    console.print(comparison(spread, alone))
    console.print("""
Saved as a plain Hugging Face checkpoint, loaded in a fresh process by
Transformers alone:""")
    console.print(*[f"  {line}" for line in reloaded], sep="\n", markup=False)
    console.print(f"""
ZeRO-3 alone gathers all experts of a layer on every rank to run it. With expert
parallelism they stay where they are stored and the tokens travel to them.

the trained model            {RUNS / expert_config.stem}
loss curve                   {CURVE}
figures, ranks' output       {RUNS}/*.figures.json, {RUNS}/*.log
the script, an ordinary one  {os.path.relpath(HERE / 'train.py')}
the configurations           {expert_config}, {plain_config}""", soft_wrap=True)  # yapf: disable


if __name__ == "__main__":
    main()
