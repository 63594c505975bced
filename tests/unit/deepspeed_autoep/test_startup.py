# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The start-up line runs in every Python process of the machine: it must cost next to nothing and touch nothing."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed_autoep

ROOT = Path(__file__).parents[3]
LINE = (ROOT / "deepspeed_autoep.pth").read_text()
PACKAGE_FOLDER = str(Path(deepspeed_autoep.__file__).parents[1])


def run_line(after="", **environment):
    """Run the start-up line in an interpreter without site-packages; return the modules that it imported.

    ``after`` may change ``new``, the returned list.
    """
    code = (f"import sys, os\nsys.path.insert(0, {PACKAGE_FOLDER!r})\nbefore = set(sys.modules)\n{LINE}\n"
            f"new = sorted(set(sys.modules) - before)\n{after}\nimport json\nprint(json.dumps(new))")
    done = subprocess.run([sys.executable, "-I", "-S", "-W", "error", "-c", code],
                          env=environment,
                          capture_output=True,
                          text=True,
                          check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_line_imports_two_modules_of_ours_and_nothing_else():
    assert run_line() == ["deepspeed_autoep", "deepspeed_autoep.finder"]
    assert run_line(DS_AUTOEP="1") == run_line()


def test_line_is_off():
    assert run_line(DS_AUTOEP="0") == []
    assert run_line("import deepspeed_autoep\nnew = [type(f).__name__ for f in sys.meta_path]",
                    DS_AUTOEP="0").count("OverlayFinder") == 0


def test_line_is_one_line_that_site_executes():
    assert LINE.startswith("import ") and LINE.count("\n") == 1


def test_other_imports_do_not_wake_the_overlay():
    """Not even the overlay's folder is listed before a DeepSpeed module is asked for."""
    after = ("import json, email, deepspeed_autoep\n"
             "new = [sys.meta_path[0]._files, sys.meta_path[0]._overlay, 'deepspeed_autoep.overlay' in sys.modules]")
    assert run_line(after) == [None, None, False]


@pytest.mark.parametrize("limit, code", [("1000", 0), ("-1000", 1)])
def test_benchmark(limit, code):
    done = subprocess.run([sys.executable, ROOT / "benchmarks/startup.py", "--starts", "3", "--limit-ms", limit],
                          capture_output=True,
                          text=True)
    assert done.returncode == code, done.stderr
    figures = [line.split(" ms ")[0].split()[-1] for line in done.stdout.splitlines()]
    assert len([float(figure) for figure in figures]) == 3


def test_benchmark_measures_the_line_that_is_shipped():
    assert f"LINE = {LINE.strip()!r}"[:-1] in (ROOT / "benchmarks/startup.py").read_text()
