# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The import hook: runs a twin after the module that it extends, and serves the modules that DeepSpeed lacks.

Only ``os`` and ``sys`` are imported here; the rest is loaded with the first module that has a twin.
"""
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
# Of DeepSpeed; seen whether it has a twin or not: a misfit becomes an error when a configuration is read.
_CONFIG_MODULE = "deepspeed.runtime.config"


def overlay_root(package: str) -> str:
    """The folder that mirrors the package's tree: inside this package in a wheel, beside it in a checkout."""
    in_wheel = os.path.isdir(os.path.join(_HERE, "deepspeed"))
    return os.path.join(_HERE if in_wheel else os.path.dirname(_HERE), package)


def modules_below(root: str, package: str) -> dict:
    """Map the dotted module name of every ``.py`` file below ``root`` to its path."""
    found = {}
    for folder, _, files in os.walk(root):
        parts = [package] + [part for part in os.path.relpath(folder, root).split(os.sep) if part != "."]
        for file in files:
            if file.endswith(".py"):
                found[".".join(parts + [file[:-3]])] = os.path.join(folder, file)
    return found


class OverlayFinder:
    """A ``sys.meta_path`` finder for one package and the overlay folder that extends it.

    Args:
        config_module: dotted name of the module whose configuration class refuses a misfit, if it is in the package.
        overlay_options: of ``Overlay``.
    """

    def __init__(self, package: str, root: str, config_module=None, **overlay_options):
        self.package = package
        self.root = root
        self._prefix = package + "."
        self._config_module = config_module
        self._overlay_options = overlay_options
        self._files = None
        self._overlay = None

    @property
    def files(self) -> dict:
        if self._files is None:
            self._files = modules_below(self.root, self.package)
        return self._files

    @property
    def overlay(self):
        if self._overlay is None:
            from deepspeed_autoep.overlay import Overlay
            self._overlay = Overlay(self.package, self.files, self._config_module, **self._overlay_options)
        return self._overlay

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(self._prefix) or name not in self.files and name != self._config_module:
            return None
        spec = self._spec_without_us(name, path, target)
        if spec is None and name in self.files:
            from importlib.util import spec_from_file_location
            spec = spec_from_file_location(name, self.files[name])
            spec.loader = _LoadedBy(spec.loader, self.overlay.run_new_module)
        elif spec is not None and spec.loader is not None:
            spec.loader = _LoadedBy(spec.loader, self.overlay.run_and_bind)
        return spec

    def _spec_without_us(self, name, path, target):
        for finder in sys.meta_path:
            if isinstance(finder, OverlayFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def bind_loaded(self) -> None:
        """Bind the twins of modules that were imported before the overlay was switched on."""
        if self.package not in sys.modules:
            return
        # Listed first: what a twin imports meets this finder, so it is bound, or new, already.
        for module in [sys.modules[name] for name in self.overlay.seen if name in sys.modules]:
            self.overlay.bind(module)


class _LoadedBy:
    """A module's own loader, whose module is run by the overlay: ``run(loader, module)``."""

    def __init__(self, loader, run):
        self._loader = loader
        self._run = run

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # Put back before the body runs: reload, inspect and resource readers then see a module as without us.
        module.__spec__.loader = module.__loader__ = self._loader
        self._run(self._loader, module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


def installed_finders() -> list:
    """The finders of our overlays, that on DeepSpeed first; none when they are switched off."""
    return sorted((f for f in sys.meta_path if isinstance(f, OverlayFinder)),
                  key=lambda finder: (finder.package != "deepspeed", finder.package))


def install() -> None:
    """Switch the overlays on for this process. Calling it again changes nothing."""
    if installed_finders():
        return
    beside = [OverlayFinder(package, overlay_root(package)) for package in ("accelerate", "transformers")]
    for finder in (*beside, OverlayFinder("deepspeed", overlay_root("deepspeed"), _CONFIG_MODULE, beside=beside)):
        sys.meta_path.insert(0, finder)
        finder.bind_loaded()
