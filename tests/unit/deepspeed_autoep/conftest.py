# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the overlay is shown on: a package made up by the test, and DeepSpeed itself in a fresh interpreter."""
import json
import os
import subprocess
import sys

import pytest
from fake_package import PACKAGE, FakePackage
from interpreters import fresh_environment


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module rewritten within a second has the same mtime
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("DS_AUTOEP_OFF", raising=False)
    package = FakePackage(tmp_path)
    monkeypatch.syspath_prepend(package.source.parent)
    yield package
    for name in list(sys.modules):
        if name.removeprefix("deepspeed_autoep.").split(".")[0] == PACKAGE:
            del sys.modules[name]


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Call a function of a module in this folder in a fresh interpreter: ``fresh(function, *args, DS_AUTOEP="0")``.

    Arguments and result travel as JSON.
    """

    def call(function, *args, **environment):
        folder = tmp_path_factory.mktemp(function.__name__)
        code = (
            f"import json, sys; sys.path.insert(0, {os.path.dirname(sys.modules[function.__module__].__file__)!r})\n"
            f"from {function.__module__} import {function.__name__} as function\n"
            f"result = function(*json.loads({json.dumps(json.dumps(args))}))\n"
            "json.dump(result, open('result.json', 'w'))")
        done = subprocess.run([sys.executable, "-c", code],
                              cwd=folder,
                              env=fresh_environment(**environment),
                              stdin=subprocess.DEVNULL,
                              capture_output=True,
                              text=True,
                              timeout=120)
        assert done.returncode == 0, f"{function.__name__} failed:\n{done.stdout}\n{done.stderr}"
        return json.loads((folder / "result.json").read_text())

    return call
