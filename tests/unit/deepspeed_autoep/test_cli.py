# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``ds_autoep status``: each extension, what became of it, and why."""
import subprocess
import sys

import pytest
from interpreters import fresh_environment
from tables import table_rows

import deepspeed_autoep
from deepspeed_autoep import cli

TWIN = """
replaces("LIMIT", 99, feature="limits", why="ten is not enough")
replaces("untouched", 99, feature="other", why="left out", unless=lambda module: 1 / 0)
replaces("Counter", 99, feature="counting", why="counts already", unless=lambda module: True)

@extends("double", feature="doubling", why="a third argument")
def double(x: list[int], factor=2, extra: "dict[str, int]" = None):
    pass
"""


@pytest.fixture
def status(fake, monkeypatch, capsys):
    """Run ``ds_autoep status`` on the made-up package; returns the exit status and the printed text."""

    def run():
        finder = fake.finder()
        sys.meta_path.insert(0, finder)
        monkeypatch.setattr(cli, "installed_finders", lambda: [finder])
        return cli.main(["status"]), capsys.readouterr().out

    return run


def test_every_state_with_its_reason(fake, status, monkeypatch):
    fake.twin("maths.py", TWIN)
    monkeypatch.setenv("DS_AUTOEP_OFF", "other")
    code, printed = status()
    assert code == 1
    assert f"deepspeed-autoep {deepspeed_autoep.__version__} on fakespeed 1.5.0" in printed
    assert table_rows(printed) == [
        [
            "counting", "fakespeed.maths.Counter", "already upstream",
            "the installed release behaves like this already (counts already)"
        ],
        [
            "doubling", "fakespeed.maths.double", "does not fit",
            "found (x, factor=2), expected (x: list[int], factor=2, extra: 'dict[str, int]' = None) (a third argument)"
        ],
        ["limits", "fakespeed.maths.LIMIT", "applied", "ten is not enough"],
        ["other", "fakespeed.maths.untouched", "off", "DS_AUTOEP_OFF names other (left out)"],
    ]


def test_exit_status_is_zero_when_everything_fits(fake, status):
    fake.twin("maths.py", TWIN.split("\n\n")[0].replace("1 / 0", "False"))
    code, printed = status()
    assert code == 0
    assert [row[2] for row in table_rows(printed)] == ["already upstream", "applied", "applied"]


def test_a_name_that_is_no_feature_is_told(fake, status, monkeypatch):
    fake.twin("maths.py", TWIN.split("\n\n")[0].replace("1 / 0", "False"))
    monkeypatch.setenv("DS_AUTOEP_OFF", "limits,limit")
    code, printed = status()
    assert code == 1
    assert "DS_AUTOEP_OFF: found limit; allowed: counting, limits, other, separated by commas" in printed


def test_module_that_cannot_be_imported_is_listed(fake, status):
    fake.twin("gone.py", TWIN)
    fake.twin("new.py", "VALUE = 1\n")
    code, printed = status()
    assert code == 1
    [row] = table_rows(printed)
    assert row[1:3] == ["fakespeed.gone.*", "does not fit"]
    assert row[3].startswith("importing it failed with ModuleNotFoundError: No module named 'fakespeed.gone'")


@pytest.mark.parametrize("arguments, code, printed", [
    (["--version"], 0, deepspeed_autoep.__version__),
    (["--help"], 0, "status"),
    ([], 2, "the following arguments are required: command"),
    (["statsu"], 2, "invalid choice: 'statsu'"),
])
def test_command_line(arguments, code, printed):
    done = subprocess.run([sys.executable, "-m", "deepspeed_autoep.cli", *arguments],
                          env=fresh_environment(COLUMNS="80"),
                          capture_output=True,
                          text=True)
    assert done.returncode == code
    assert printed in done.stdout + done.stderr
