# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""How a twin declares what it changes: one decorator per change, checked against the function that it extends."""
import contextlib
import dataclasses
import enum
import inspect
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, Callable, Optional


class State(enum.Enum):
    """What became of an extension."""
    APPLIED = "applied"
    UPSTREAM = "already upstream"
    OFF = "off"
    DRIFT = "does not fit"


@dataclasses.dataclass
class Extension:
    """One declared change of a loaded module.

    Attributes:
        target: qualified name inside the module, such as ``"DeepSpeedEngine._configure_expert_parallel"``.
        feature: the name by which ``DS_AUTOEP_OFF`` switches it off; several extensions may share one.
        why: one sentence for ``ds_autoep status`` and for a reviewer.
        replacement: the function bound in place of the target, or the value bound to a module attribute.
        unless: probe of the loaded module; True when it already behaves as wanted.
        is_new: whether the target does not exist in the module and is added.
    """
    target: str
    feature: str
    why: str
    replacement: Any
    unless: Optional[Callable[[ModuleType], bool]] = None
    is_new: bool = False
    module: str = ""
    state: Optional[State] = None
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.target}"


_collecting = ContextVar("collecting", default=None)  # of this thread: others may be importing, too


@contextlib.contextmanager
def collect_extensions():
    """Yield the list that receives the extensions declared inside the block."""
    declared = []
    token = _collecting.set(declared)
    try:
        yield declared
    finally:
        _collecting.reset(token)


def _declare(extension: Extension) -> None:
    declared = _collecting.get()
    if declared is not None:  # a twin imported by hand, as unit tests do, declares nothing
        declared.append(extension)


def extends(target: str, *, feature: str, why: str, unless=None):
    """Declare that the decorated function takes the place of ``target``, a function, method or class of the module.

    The decorated function calls what it extends as ``<its own name>.original(...)``. Its parameters must be those of
    the target; ``*args, **kwargs`` at the end may stand for a tail that differs between supported releases.
    """

    def declare(function):
        function.original = None
        _declare(Extension(target, feature, why, function, unless))
        return function

    return declare


def adds(target: str, *, feature: str, why: str):
    """Declare that the decorated function becomes ``target``; a release that has one of its own keeps that."""

    def declare(function):
        _declare(Extension(target, feature, why, function, is_new=True))
        return function

    return declare


def replaces(target: str, value, *, feature: str, why: str, unless=None):
    """Declare that module attribute ``target`` is to hold ``value``; returns ``value``."""
    _declare(Extension(target, feature, why, value, unless))
    return value


def undecorated(function: Any) -> Any:
    """The function behind decorators that do not say what they decorate, as DeepSpeed's ``instrument_w_nvtx``."""
    while isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
        decorates = str(inspect.signature(function)) == "(*args, **kwargs)" and "<locals>" in function.__qualname__
        inside = [cell.cell_contents for cell in function.__closure__ or () if decorates]
        functions = [value for value in inside if isinstance(value, FunctionType)]
        if len(functions) != 1:
            break
        function = functions[0]
    return function


def signature_mismatch(extension: Callable, target: Callable) -> Optional[str]:
    """Say how ``extension`` fails to accept the calls that ``target`` accepts, or return None when it fits."""
    ours = list(inspect.signature(extension).parameters.values())
    theirs = list(inspect.signature(target).parameters.values())
    named = [p for p in ours if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    forwards = {p.kind for p in ours} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    same = [(p.name, p.kind, p.default) for p in named] == [(p.name, p.kind, p.default) for p in theirs[:len(named)]]
    if same and (forwards or len(ours) == len(theirs)):
        return None
    return f"found {inspect.signature(target)}, expected {inspect.signature(extension)}"
