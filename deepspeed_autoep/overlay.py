# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Binds twins to the modules that they extend, and refuses to train with a DeepSpeed that they do not fit.

A job without an ``expert_parallel`` block must never break because of the overlay, so a misfit is only recorded when
a module is loaded; the error is raised when a configuration that enables expert parallelism is read.
"""
import functools
import importlib
import inspect
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from types import FunctionType, ModuleType
from typing import Optional

from deepspeed_autoep.extension import Extension, State, collect_extensions, signature_mismatch, undecorated

# A new module that needs one is left alone where it is missing: who uses the module asks first.
OPTIONAL_PACKAGES = {"triton"}
# Per package: the releases that the twins were written for, and the one to install when another does not fit.
_RELEASES = {"deepspeed": (">=0.19.6,<0.20", "0.19.8"), "transformers": (">=5.17,<6", "5.24.0"),
             "accelerate": (">=1.15,<2", "1.15.0")}  # yapf: disable
# Constructing this class is the first thing that zero.Init, deepspeed.initialize and the Trainer do with a config.
CONFIG_CLASS = "DeepSpeedConfig"


class OverlayError(RuntimeError):
    """The installed DeepSpeed is not one that the overlay can extend."""


def features_off() -> frozenset:
    """Names in ``DS_AUTOEP_OFF`` (comma-separated)."""
    return frozenset(name.strip() for name in os.environ.get("DS_AUTOEP_OFF", "").split(",") if name.strip())


def unknown_features(overlays) -> Optional[str]:
    """What is wrong with ``DS_AUTOEP_OFF``, or None; the overlays have loaded all."""
    features = {e.feature for overlay in overlays for e in overlay.extensions}
    unknown = sorted(features_off() - features)
    if not unknown:
        return None
    return (f"DS_AUTOEP_OFF: found {', '.join(unknown)}; allowed: {', '.join(sorted(features))}, separated by commas")


def _function(raw):
    """What stands behind an attribute: the function of a static or class method, without its decorators."""
    return undecorated(getattr(raw, "__func__", raw))


class Overlay:
    """The twins of one package and what became of the extensions that they declare.

    Args:
        package: the package that is extended.
        files: dotted module name -> file, for every twin and every new module.
        config_module: dotted name of the module whose ``CONFIG_CLASS`` refuses a misfit, if it is in this package.
        releases: version specifier of the releases that the twins were written for, and the one to install when
            another does not fit.
        beside: the ``OverlayFinder`` of each other package that has to fit as well.
    """

    def __init__(self, package: str, files: dict, config_module: Optional[str], releases=None, beside=()):
        self.package = package
        self.files = files
        self.supported, self.tested = releases or _RELEASES[package]
        self._beside = beside
        self._recorded: dict = {}  # module name -> its extensions
        self._config_module = config_module

    @property
    def seen(self) -> list:
        """Names of the modules that have a twin or are new, and of the one that reads configurations."""
        return sorted({*self.files, *filter(None, [self._config_module])})

    @property
    def extensions(self) -> list:
        return [extension for extensions in list(self._recorded.values()) for extension in extensions]

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

    @staticmethod
    def run_new_module(loader, module: ModuleType) -> None:
        """Run a module that the package lacks. A twin is not one: where its target is gone, nothing is served."""
        with collect_extensions() as declared:
            loader.exec_module(module)
        if declared:
            raise ModuleNotFoundError(f"No module named {module.__name__!r}", name=module.__name__)

    def run_and_bind(self, loader, module: ModuleType) -> None:
        """Run a module of the package, then bind its twin."""
        loader.exec_module(module)
        self.bind(module)

    def bind(self, module: ModuleType) -> None:
        """Run the twin of ``module`` and bind what it declares. Never raises: a misfit is recorded."""
        guard = self._guard_config(module) if module.__name__ == self._config_module else []
        self._record(module.__name__, guard + (self._bind_twin(module) if module.__name__ in self.files else []))

    def _record(self, module_name: str, extensions: list) -> None:
        for extension in extensions:
            extension.module = module_name
        self._recorded[module_name] = extensions  # in place of what was recorded before: a reload binds again

    def _bind_twin(self, module: ModuleType) -> list:
        with collect_extensions() as declared:
            try:
                if self.outside_window is None:
                    self._run_twin(module)
                else:
                    declared.append(self._whole_twin(self.outside_window))
            except Exception as error:
                declared[:] = [self._whole_twin(f"its twin failed with {type(error).__name__}: {error}")]
        for extension in declared:
            self._settle_without_change(extension, module)
        for extension in declared:  # only now: a probe must see the module as its release left it
            if extension.state is None:
                self._apply(extension, module)
        return declared

    @staticmethod
    def _whole_twin(reason) -> Extension:
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
            if extension.is_new:
                self._add(extension, owner, attribute)
                return
            raw = vars(owner)[attribute]
        except (AttributeError, KeyError, TypeError):
            extension.state, extension.reason = State.DRIFT, f"found no {extension.target}"
            return
        try:
            if isinstance(extension.replacement, FunctionType):
                extension.reason = signature_mismatch(extension.replacement, _function(raw)) or ""
                if not extension.reason:
                    self._bind_function(extension, module, owner, raw)
            else:
                setattr(owner, attribute, extension.replacement)
        except Exception as error:  # what stands there now is no function, or cannot be set
            extension.reason = (f"found {type(raw).__name__} {extension.target}, which cannot be extended "
                                f"({type(error).__name__}: {error})")
        extension.state = State.DRIFT if extension.reason else State.APPLIED

    @staticmethod
    def _add(extension: Extension, owner, attribute: str) -> None:
        if hasattr(owner, attribute):
            extension.state, extension.reason = State.UPSTREAM, f"the installed release has a {attribute}"
            return
        setattr(owner, attribute, extension.replacement)
        extension.state = State.APPLIED

    def _bind_function(self, extension: Extension, module: ModuleType, owner, raw) -> None:
        function, attribute = extension.replacement, extension.target.rpartition(".")[2]
        function.original = getattr(raw, "__func__", raw)
        function.__signature__ = inspect.signature(_function(raw))
        # Found, and pickled, under the name at which it is bound.
        function.__module__, function.__qualname__, function.__name__ = module.__name__, extension.target, attribute
        function.__doc__ = function.__doc__ or function.original.__doc__
        bound = type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function
        setattr(owner, attribute, bound)
        if owner is module and getattr(_function(raw), "__module__", None) == module.__name__:
            self._rebind_importers(raw, bound)

    def _rebind_importers(self, old, new) -> None:
        """Point ``from module import name`` copies made before the overlay was switched on at the new function."""
        for name, module in list(sys.modules.items()):
            if (name + ".").startswith(self.package + ".") and isinstance(module, ModuleType):
                for attribute in [key for key, value in vars(module).items() if value is old]:
                    setattr(module, attribute, new)

    def _guard_config(self, module: ModuleType) -> list:
        """Make reading a configuration that enables expert parallelism the moment at which a misfit is an error."""
        config_class = getattr(module, CONFIG_CLASS, None)
        if not isinstance(config_class, type):
            return [Extension(CONFIG_CLASS, "all", "a misfit is an error when a configuration is read", None,
                              state=State.DRIFT, reason=f"found no class {CONFIG_CLASS}")]  # yapf: disable
        original = config_class.__init__

        @functools.wraps(original)
        def guarded(config, *args, **kwargs):
            original(config, *args, **kwargs)
            block = getattr(config, "_param_dict", {}).get("expert_parallel")
            if isinstance(block, dict) and block.get("enabled"):
                self.require_fit()

        config_class.__init__ = guarded
        return []

    def load_all(self) -> None:
        """Import every module that has a twin, so that each extension has met its target."""
        for name in self.seen:
            try:
                importlib.import_module(name)
            except Exception as error:
                if getattr(error, "name", None) in OPTIONAL_PACKAGES:
                    continue
                self._record(name, [self._whole_twin(f"importing it failed with {type(error).__name__}: {error}")])

    def require_fit(self) -> None:
        """Raise OverlayError when an extension, of this package or the one beside, does not fit what is installed."""
        overlays = [self, *(finder.overlay for finder in self._beside)]
        for overlay in overlays:
            overlay.load_all()
            overlay._raise_misfits()
        unknown = unknown_features(overlays)
        if unknown:
            raise OverlayError(unknown)

    def _raise_misfits(self) -> None:
        misfits = [e for e in self.extensions if e.state is State.DRIFT]
        if misfits:
            listed = "\n".join(f"  {e.name}: {e.reason}" for e in misfits)
            raise OverlayError(
                f"expert_parallel: the deepspeed-autoep overlay does not fit {self.package} {self.found_version}:\n"
                f"{listed}\nInstall a release that it was tested on: pip install '{self.package}=={self.tested}'. "
                "Jobs without an expert_parallel block are not affected; DS_AUTOEP=0 switches the overlay off.")
