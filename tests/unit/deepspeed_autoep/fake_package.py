# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""A package and an overlay on it that a test writes to disk: it can drift, break and be reloaded at will."""
import importlib
import sys
import textwrap

from deepspeed_autoep.finder import OverlayFinder

PACKAGE = "fakespeed"
HEADER = "from deepspeed_autoep.extension import adds, extends, replaces\n"
SOURCES = {
    "__init__.py":
    "__version__ = '1.5.0'\n",
    "runtime/__init__.py":
    "",
    "runtime/config.py":
    """
        class DeepSpeedConfig:

            def __init__(self, config, mpu=None):
                self._param_dict = config
        """,
    "maths.py":
    """
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

    def finder(self, supported=">=1.4,<2", beside=()):
        return OverlayFinder(PACKAGE,
                             str(self.overlay_root),
                             f"{PACKAGE}.runtime.config",
                             releases=(supported, "1.5.0"),
                             beside=beside)

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
