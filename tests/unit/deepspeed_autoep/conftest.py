# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What the overlay is shown on: a package and twins written by the test, and DeepSpeed itself in a fresh interpreter.

A made-up package can drift, break and be reloaded at will; DeepSpeed shows that the mechanism meets the real thing.
"""
import importlib
import json
import os
import site
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import deepspeed_autoep
from deepspeed_autoep.finder import OverlayFinder

PACKAGE = "fakespeed"
HEADER = "from deepspeed_autoep.extension import extends, replaces\n"
SOURCES = {
    "__init__.py": "__version__ = '1.5.0'\n",
    "runtime/__init__.py": "",
    "runtime/config.py": """
        class DeepSpeedConfig:

            def __init__(self, config, mpu=None):
                self._param_dict = config
        """,
    "maths.py": """
        LIMIT = 10


        def double(x, factor=2):
            return x * factor


        def untouched(x):
            return x


        class Counter:
            def step(self, by=1):
                return by

            @staticmethod
            def zero(start=0):
                return start

            @classmethod
            def label(cls, suffix=""):
                return cls.__name__ + suffix

            class Inner:
                def depth(self):
                    return 1
        """,
}


class FakePackage:
    """An importable package ``fakespeed`` and an overlay on it."""

    def __init__(self, folder):
        self.source, self.overlay_root = folder / "site" / PACKAGE, folder / "overlay"
        for path, text in SOURCES.items():
            self.write(path, text)
        self.overlay_root.mkdir()

    def write(self, path, text):
        """Write a module of the package."""
        self._write(self.source / path, text)

    def twin(self, path, text):
        """Write a file of the overlay; returns its path."""
        return self._write(self.overlay_root / path, HEADER + textwrap.dedent(text))

    @staticmethod
    def _write(file, text):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return file

    def finder(self, supported=">=1.4,<2"):
        return OverlayFinder(PACKAGE, str(self.overlay_root), supported=supported, tested="1.5.0")

    def switch_on(self, **options):
        """Do what ``deepspeed_autoep.finder.install`` does for DeepSpeed; returns the overlay."""
        finder = self.finder(**options)
        sys.meta_path.insert(0, finder)
        finder.bind_loaded()
        return finder.overlay

    def load(self, name=None):
        return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)

    def read_config(self, **param_dict):
        """Read a configuration, as ``deepspeed.initialize`` does first of all."""
        return self.load("runtime.config").DeepSpeedConfig(param_dict)


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


def fresh_environment(**environment):
    """Variables for an interpreter that finds the same ``deepspeed_autoep`` as this one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DS_AUTOEP")}
    root = str(Path(deepspeed_autoep.__file__).parents[1])
    if root not in site.getsitepackages():
        inherited["PYTHONPATH"] = root
    return {**inherited, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Call a function of a test module in a fresh interpreter: ``fresh(function, *args, DS_AUTOEP="0")``.

    Arguments and result travel as JSON.
    """

    def call(function, *args, **environment):
        folder = tmp_path_factory.mktemp(function.__name__)
        code = (f"import json, sys; sys.path[:0] = {[path for path in sys.path if 'tests' in path]!r}\n"
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
