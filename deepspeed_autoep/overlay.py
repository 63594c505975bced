# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Binds twins to the modules that they extend, and refuses to train with a DeepSpeed that they do not fit.

A job without an ``expert_parallel`` block must never break because of the overlay, so a misfit is only recorded when
a module is loaded; the error is raised when a configuration that enables expert parallelism is read.
"""
import functools
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from types import FunctionType, ModuleType
from typing import Optional

from deepspeed_autoep.extension import Extension, State, collect_extensions, signature_mismatch

SUPPORTED_DEEPSPEED = ">=0.19.6,<0.20"
# Constructing this class is the first thing that zero.Init, deepspeed.initialize and the Trainer do with a config.
CONFIG_MODULE, CONFIG_CLASS = "runtime.config", "DeepSpeedConfig"


class OverlayError(RuntimeError):
    """The installed DeepSpeed is not one that the overlay can extend."""


def features_off() -> frozenset:
    """Names in ``DS_AUTOEP_OFF`` (comma-separated)."""
    return frozenset(name.strip() for name in os.environ.get("DS_AUTOEP_OFF", "").split(",") if name.strip())


class Overlay:
    """The twins of one package and what became of the extensions that they declare.

    Args:
        package: the package that is extended.
        files: dotted module name -> file, for every twin and every new module.
        supported: version specifier of the releases that the twins were written for.
    """

    def __init__(self, package: str, files: dict, supported: str = SUPPORTED_DEEPSPEED):
        self.package = package
        self.files = files
        self.supported = supported
        self.extensions: list = []

    @functools.cached_property
    def found_version(self) -> Optional[str]:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return getattr(sys.modules.get(self.package), "__version__", None)

    @functools.cached_property
    def outside_window(self) -> Optional[str]:
        """Why the installed release is not supported, or None."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion
        try:
            if self.found_version is not None and SpecifierSet(self.supported).contains(self.found_version, True):
                return None
        except InvalidVersion:
            pass
        return f"found {self.package} {self.found_version}, expected {self.package}{self.supported}"

    def bind(self, module: ModuleType) -> None:
        """Run the twin of ``module`` and bind what it declares. Never raises: a misfit is recorded."""
        if module.__name__ == f"{self.package}.{CONFIG_MODULE}":
            self._guard_config(module)
        self.extensions = [e for e in self.extensions if e.module != module.__name__]  # a reload binds again
        with collect_extensions() as declared:
            try:
                if self.outside_window is None:
                    self._run_twin(module)
                else:
                    declared.append(self._whole_twin(module, self.outside_window))
            except Exception as error:
                declared.clear()
                declared.append(self._whole_twin(module, f"its twin failed with {type(error).__name__}: {error}"))
        for extension in declared:
            extension.module = module.__name__
            self._settle_without_change(extension, module)
        for extension in declared:  # only now: a probe must see the module as its release left it
            if extension.state is None:
                self._apply(extension, module)
        self.extensions += declared

    @staticmethod
    def _whole_twin(module, reason) -> Extension:
        return Extension("*", "all", "every extension of this module", None, state=State.DRIFT, reason=reason)

    def _run_twin(self, module) -> None:
        name = f"deepspeed_autoep.{module.__name__}"
        spec = spec_from_file_location(name, self.files[module.__name__])
        twin = module_from_spec(spec)
        sys.modules[name] = twin  # so that tracebacks, pickle and inspect find what it defines
        spec.loader.exec_module(twin)

    @staticmethod
    def _settle_without_change(extension: Extension, module: ModuleType) -> None:
        """Set the state of an extension that is switched off, not needed, or cannot be probed."""
        if extension.state is not None:
            return
        if extension.feature in features_off():
            extension.state, extension.reason = State.OFF, f"DS_AUTOEP_OFF names {extension.feature}"
            return
        try:
            if extension.unless is not None and extension.unless(module):
                extension.state, extension.reason = State.UPSTREAM, "the installed release behaves like this already"
        except Exception as error:
            extension.state, extension.reason = State.DRIFT, f"its probe failed with {type(error).__name__}: {error}"

    def _apply(self, extension: Extension, module: ModuleType) -> None:
        *path, attribute = extension.target.split(".")
        try:
            owner = functools.reduce(getattr, path, module)
            raw = vars(owner)[attribute]
        except (AttributeError, KeyError):
            extension.state, extension.reason = State.DRIFT, f"found no {extension.target}"
            return
        if not isinstance(extension.replacement, FunctionType):
            setattr(owner, attribute, extension.replacement)
        else:
            mismatch = signature_mismatch(extension.replacement, getattr(raw, "__func__", raw))
            if mismatch is not None:
                extension.state, extension.reason = State.DRIFT, mismatch
                return
            self._bind_function(extension.replacement, owner, attribute, raw)
        extension.state = State.APPLIED

    def _bind_function(self, function, owner, attribute, raw) -> None:
        function.original = getattr(raw, "__func__", raw)
        function.__module__ = function.original.__module__
        function.__name__, function.__qualname__ = attribute, function.original.__qualname__  # pickled by that name
        function.__doc__ = function.__doc__ or function.original.__doc__
        bound = type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function
        setattr(owner, attribute, bound)
        if isinstance(owner, ModuleType):
            self._rebind_importers(raw, bound)

    def _rebind_importers(self, old, new) -> None:
        """Point ``from module import name`` copies made before the overlay was switched on at the new function."""
        for name, module in list(sys.modules.items()):
            if name.startswith(self.package + ".") and isinstance(module, ModuleType):
                for attribute in [key for key, value in vars(module).items() if value is old]:
                    setattr(module, attribute, new)

    def _guard_config(self, module: ModuleType) -> None:
        """Make reading a configuration that enables expert parallelism the moment at which a misfit is an error."""
        config_class = getattr(module, CONFIG_CLASS, None)
        if config_class is None or getattr(config_class.__init__, "ds_autoep_guard", False):
            return
        original = config_class.__init__

        @functools.wraps(original)
        def guarded(config, *args, **kwargs):
            original(config, *args, **kwargs)
            block = getattr(config, "_param_dict", {}).get("expert_parallel")
            if isinstance(block, dict) and block.get("enabled"):
                self.require_fit()

        guarded.ds_autoep_guard = True
        config_class.__init__ = guarded

    def load_all(self) -> None:
        """Import every module that has a twin, so that each extension has met its target."""
        for name in self.files:
            importlib.import_module(name)

    def require_fit(self) -> None:
        """Raise OverlayError when an extension does not fit the installed release."""
        self.load_all()
        misfits = [e for e in self.extensions if e.state is State.DRIFT]
        if misfits:
            listed = "\n".join(f"  {e.name}: {e.reason}" for e in misfits)
            raise OverlayError(
                f"expert_parallel: the deepspeed-autoep overlay does not fit {self.package} {self.found_version}:\n"
                f"{listed}\nInstall a supported release: pip install '{self.package}{self.supported}'. "
                "Jobs without an expert_parallel block are not affected; DS_AUTOEP=0 switches the overlay off.")
