# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The repository's own commit checks, which `make lint` and the git hooks run."""
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
HEADER = "# Copyright (c) DeepSpeed Team.\n# SPDX-License-Identifier: Apache-2.0\n"


def check(name, *files):
    done = subprocess.run([sys.executable, ROOT / ".ci" / f"check_{name}.py", *files], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("line, refused", [
    ("import torch.distributed", True),
    ("import torch.distributed as dist", True),
    ("import os, torch.distributed.nn", True),
    ("from torch import nn, distributed", True),
    ("from torch.distributed import ReduceOp", True),
    ("from torch.distributed.tensor import DTensor", True),
    ("import torch\ntorch.distributed.barrier()", True),
    ("def f():\n    from torch import distributed", True),
    ("import deepspeed.comm as dist\ndist.barrier()", False),
    ("import torch.distributions\nfrom torch import distributions", False),
    ("'''torch.distributed'''  # import torch.distributed", False),
])
def test_comm(tmp_path, line, refused):
    file = tmp_path / "module.py"
    file.write_text(f"import sys\n{line}\n")
    code, printed = check("comm", file)
    assert code == refused
    assert printed == (f"{file}:{2 + line.count(chr(10))}: use deepspeed.comm\n" if refused else "")


@pytest.mark.parametrize("text, refused", [
    (HEADER, False),
    (HEADER + '"""Why."""\n', False),
    ("#!/usr/bin/env bash\n" + HEADER, False),
    ("", True),
    ("\n" + HEADER, True),
    (HEADER.replace("Apache-2.0", "MIT"), True),
    (HEADER.splitlines()[1], True),
])
def test_licence(tmp_path, text, refused):
    file = tmp_path / "module.py"
    file.write_text(text)
    code, printed = check("licence", file)
    assert code == refused and (str(file) in printed) == refused


@pytest.mark.parametrize("message, refused", [
    ("Fix it\n\nSigned-off-by: A Name <a@b.org>\n", False),
    ("Fix it\n\nSigned-off-by: A Name <a@b.org>\nReviewed-by: B <b@b.org>\n", False),
    ("Fix it\n", True),
    ("Fix it\n\nSigned-off-by: A Name\n", True),
    ("Fix it\n\n# Signed-off-by: A Name <a@b.org>\n", True),
    ("Fix it, says Signed-off-by: A Name <a@b.org>\n", True),
])
def test_signoff(tmp_path, message, refused):
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    code, printed = check("signoff", file)
    assert code == refused and ("git commit --signoff" in printed) == refused


def test_this_repository_passes():
    for name, folders in (("comm", ["deepspeed"]), ("licence", ["deepspeed", "deepspeed_autoep", "tests", ".ci"])):
        files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
        assert files and check(name, *files) == (0, "")


def test_hooks_fetch_nothing():
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert {hook["id"] for hook in repository["hooks"]} == {"yapf", "flake8", "comm", "licence", "signoff"}
    assert "additional_dependencies" not in str(repository)
