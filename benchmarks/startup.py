# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the start-up line costs each Python process: the wheel's ``.pth`` runs in all of them, DeepSpeed or not.

Interpreters with and without the line start in turn, so that a busy machine slows both alike. Each gets a folder with
nothing but the line, no site-packages, so that nothing else is measured and nothing that the line needs is there yet.

    python benchmarks/startup.py [--starts 30] [--limit-ms 2]
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import deepspeed_autoep

ROOT = Path(deepspeed_autoep.__file__).parents[1]
LINE = 'import os; os.environ.get("DS_AUTOEP") == "0" or __import__("deepspeed_autoep")\n'
SCRIPT = "import site, sys; site.addsitedir(sys.argv[1])"


def start(folder, *flags):
    """Start an interpreter that reads the ``.pth`` files of ``folder``; return milliseconds and what it reported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DS_AUTOEP", "PYTHON"))}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-I", "-S", *flags, "-c", SCRIPT, folder],
                          env=environment,
                          check=True,
                          capture_output=True,
                          text=True)
    return 1e3 * (time.perf_counter() - begin), done.stderr


def import_time(report):
    """Milliseconds that ``-X importtime`` counted for the package and what it imported."""
    for line in report.splitlines():
        _, cumulative, name = line.rpartition(":")[2].split("|")
        if name.strip() == "deepspeed_autoep":
            return int(cumulative) / 1e3
    raise ValueError(f"the start-up line did not import deepspeed_autoep:\n{report}")


def measure(starts):
    """Medians in milliseconds: a start without the line, the difference that it makes, and its import alone."""
    with tempfile.TemporaryDirectory() as without, tempfile.TemporaryDirectory() as with_line:
        Path(with_line, "a_path.pth").write_text(f"{ROOT}\n")
        Path(with_line, "deepspeed_autoep.pth").write_text(LINE)
        Path(without, "a_path.pth").write_text(f"{ROOT}\n")
        start(with_line), start(without)  # bytecode and file caches
        pairs = [(start(without)[0], start(with_line)[0]) for _ in range(starts)]
        imports = [import_time(start(with_line, "-X", "importtime")[1]) for _ in range(starts)]
    return (statistics.median(bare for bare, _ in pairs), statistics.median(line - bare for bare, line in pairs),
            statistics.median(imports))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=30, help="interpreter starts of each kind")
    parser.add_argument("--limit-ms", type=float, default=2.0, help="exit with 1 when the line costs more")
    arguments = parser.parse_args()
    bare, cost, imports = measure(arguments.starts)
    print(f"start without the line      {bare:6.2f} ms (median of {arguments.starts})")
    print(f"the line adds               {cost:6.2f} ms (median of the differences; limit {arguments.limit_ms:g} ms)")
    print(f"import deepspeed_autoep     {imports:6.2f} ms (-X importtime, cumulative, median)")
    return 1 if cost > arguments.limit_ms else 0


if __name__ == "__main__":
    sys.exit(main())
