# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""A package that has moved on: whoever does not ask for expert parallelism never notices, whoever does is told why."""
import importlib
import sys

import pytest
from fake_package import PACKAGE, SOURCES

from deepspeed_autoep.extension import State
from deepspeed_autoep.overlay import OverlayError

TWIN = """
@extends("double", feature="f", why="w")
def double(x, factor=2):
    return double.original(x, factor) + 1

replaces("LIMIT", 99, feature="f", why="w")
"""
DECORATOR = """
        def decorator(function):
            return lambda *args, **kwargs: function(*args, **kwargs)

        def either(function, other=decorator):
            return lambda *args, **kwargs: (function or other)(*args, **kwargs)

"""
MATHS, CONFIG = DECORATOR + SOURCES["maths.py"], SOURCES["runtime/config.py"]

# What upstream did to maths.py -> what the error must name.
UPSTREAM_CHANGES = {
    "a parameter more": (("factor=2", "factor=2, power=1"),
                         ["maths.double", "found (x, factor=2, power=1)", "expected (x, factor=2)"]),
    "decorated parameter more": (("def double(x, factor=2", "@decorator\n        def double(x, power=1, factor=2"),
                                 ["found (x, power=1, factor=2)", "expected (x, factor=2)"]),
    "decorator that may call another": (("def double", "@either\n        def double"),
                                        ["found (*args, **kwargs)", "expected (x, factor=2)"]),
    "another default": (("factor=2", "factor=3"), ["maths.double", "found (x, factor=3)", "expected (x, factor=2)"]),
    "renamed parameter": (("double(x, factor", "double(y, factor"), ["found (y, factor=2)", "expected (x, factor=2)"]),
    "keyword only": (("x, factor=2", "x, *, factor=2"), ["found (x, *, factor=2)", "expected (x, factor=2)"]),
    "renamed function": (("def double", "def twice"), ["maths.double", "found no double"]),
    "no function any more": (("def double", "double = 7\n\n\n        def old"), ["found int double"]),
    "renamed value": (("LIMIT", "BOUND"), ["maths.LIMIT", "found no LIMIT"]),
}  # yapf: disable


def assert_only_expert_parallel_fails(fake, *named):
    """Import and an ordinary configuration work; a configuration that enables expert parallelism is refused."""
    for block in ({}, {"expert_parallel": {}}, {"expert_parallel": {"enabled": False}}):
        fake.read_config(**block, train_batch_size=1)
    with pytest.raises(OverlayError) as caught:
        fake.read_config(expert_parallel={"enabled": True})
    message = str(caught.value)
    for part in (*named, f"overlay does not fit {PACKAGE} ", f"pip install '{PACKAGE}==1.5.0'", "DS_AUTOEP=0"):
        assert part in message, message
    return message


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", UPSTREAM_CHANGES)
def test_target_changed(fake, change, late):
    (old, new), named = UPSTREAM_CHANGES[change]
    fake.write("maths.py", MATHS.replace(old, new, 1))
    fake.twin("maths.py", TWIN)
    if late:
        fake.load("maths"), fake.load("runtime.config")
    overlay = fake.switch_on()
    fake.load("maths")
    message = assert_only_expert_parallel_fails(fake, *named)
    assert message.count(f"  {PACKAGE}.") == 1, "only what does not fit is listed"
    assert sorted(e.state.name for e in overlay.extensions) == ["APPLIED", "DRIFT"]


@pytest.mark.parametrize("target", ["Counter.step", "Gone.step", "LIMIT.step", "Counter.step.__doc__"])
def test_owner_or_kind_changed(fake, target):
    fake.write("maths.py", MATHS.replace("def step", "@property\n            def step"))
    fake.twin("maths.py", f"@extends('{target}', feature='f', why='w')\ndef step(self, by=1):\n    return 0\n")
    fake.switch_on()
    assert fake.load("maths").Counter().step == 1
    assert_only_expert_parallel_fails(fake, f"maths.{target}: found ")


def test_target_that_cannot_be_set(fake):
    fake.write("maths.py", "double = 'text'\n")
    fake.twin("maths.py", "replaces('double.upper', 1, feature='f', why='w')\n")
    fake.switch_on()
    fake.load("maths")
    assert_only_expert_parallel_fails(fake, "maths.double.upper: found ")


@pytest.mark.parametrize("line, named", [("1 / 0", "ZeroDivisionError"), ("import fakespeed.gone", "fakespeed.gone"),
                                         ("def (", "SyntaxError")])
def test_twin_that_raises_changes_nothing(fake, line, named):
    fake.twin("maths.py", TWIN + line + "\n")
    fake.switch_on()
    assert fake.load("maths").double(3) == 6 and fake.load("maths").LIMIT == 10
    assert_only_expert_parallel_fails(fake, "maths.*: its twin failed with", named)


def test_probe_that_raises(fake):
    fake.twin("maths.py", TWIN.replace("why", "unless=lambda module: module.gone, why", 1))
    fake.switch_on()
    assert fake.load("maths").double(3) == 6
    assert_only_expert_parallel_fails(fake, "maths.double: its probe failed with AttributeError", "gone")


@pytest.mark.parametrize("found", ["1.3.9", "2.0.0", "2.0.0rc1", "master", None])
@pytest.mark.parametrize("late", [False, True])
def test_release_outside_the_window(fake, found, late):
    fake.write("__init__.py", f"__version__ = {found!r}\n")
    fake.twin("maths.py", TWIN)
    if late:
        fake.load("maths"), fake.load("runtime.config")
    fake.switch_on()
    assert fake.load("maths").double(3) == 6 and fake.load("maths").LIMIT == 10
    assert_only_expert_parallel_fails(fake, f"found {PACKAGE} {found}", f"expected {PACKAGE}>=1.4,<2")


def test_package_beside_has_to_fit_too(fake):
    fake.twin("maths.py", TWIN)
    beside = fake.finder(supported=">=1.6")
    fake.switch_on(beside=[beside])
    assert fake.load("maths").double(3) == 7
    beside.bind_loaded()
    assert_only_expert_parallel_fails(fake, f"found {PACKAGE} 1.5.0", f"expected {PACKAGE}>=1.6")


@pytest.mark.parametrize("found", ["1.4", "1.9.9", "1.5.0+cu130", "1.6.0rc1", "1.6.0.dev3+local"])
def test_release_inside_the_window(fake, found):
    fake.write("__init__.py", f"__version__ = {found!r}\n")
    fake.twin("maths.py", TWIN)
    fake.switch_on()
    assert fake.load("maths").double(3) == 7
    fake.read_config(expert_parallel={"enabled": True})


def test_metadata_says_the_release(fake, monkeypatch):
    """What is installed counts before what the module says of itself."""
    info = fake.source.parent / f"{PACKAGE}-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 3.1\n")
    fake.twin("maths.py", TWIN)
    fake.switch_on()
    assert_only_expert_parallel_fails(fake, f"found {PACKAGE} 3.1, expected")


@pytest.mark.parametrize("removed", ["maths.py", "package"])
def test_module_is_gone(fake, removed):
    """A twin is not served in place of the module that it extends: to others, what is gone is gone."""
    path = "maths.py" if removed == "maths.py" else "old/maths.py"
    fake.twin(path, TWIN)
    (fake.source / "maths.py").unlink()
    fake.switch_on()
    name = path[:-3].replace("/", ".")
    with pytest.raises(ModuleNotFoundError):
        fake.load(name)
    assert f"{PACKAGE}.{name}" not in sys.modules
    assert_only_expert_parallel_fails(fake, f"{PACKAGE}.{name}.*: importing it failed with ModuleNotFoundError")


def test_module_that_cannot_be_imported(fake):
    fake.write("maths.py", "import a_dependency_that_is_absent\n")
    fake.twin("maths.py", TWIN)
    fake.twin("new.py", "1 / 0\n")
    fake.switch_on()
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_absent"):
        fake.load("maths")
    assert_only_expert_parallel_fails(fake, "maths.*: importing it failed with ModuleNotFoundError",
                                      "new.*: importing it failed with ZeroDivisionError")


@pytest.mark.parametrize("text", ["", CONFIG.replace("class DeepSpeedConfig", "class Settings"), None])
def test_nowhere_to_refuse(fake, text):
    """Where a configuration is no longer read, the status at least says that nothing would be refused."""
    fake.twin("maths.py", TWIN)
    file = fake.source / "runtime/config.py"
    file.unlink() if text is None else fake.write("runtime/config.py", text)
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == 7
    with pytest.raises(OverlayError, match="no class DeepSpeedConfig|No module named 'fakespeed.runtime.config'"):
        overlay.require_fit()


@pytest.mark.parametrize("late", [False, True])
def test_misfit_is_found_before_its_module_is_used(fake, late):
    """The configuration is read first: modules that nothing has imported yet are loaded then."""
    fake.write("maths.py", MATHS.replace("factor=2", "factor=3"))
    fake.twin("maths.py", TWIN)
    if late:
        fake.load("runtime.config")
    fake.switch_on()
    assert f"{PACKAGE}.maths" not in sys.modules
    assert_only_expert_parallel_fails(fake, "found (x, factor=3)")


def test_config_keeps_its_face_and_its_guard(fake):
    """The class reads as before, is guarded once, and again after a reload; a twin of its module changes nothing."""
    fake.twin(
        "runtime/config.py", "@extends('DeepSpeedConfig.__init__', feature='f', why='w')\n"
        "def __init__(self, config, *args, **kwargs):\n"
        "    __init__.original(self, {**config, 'ours': 1}, *args, **kwargs)\n")
    fake.twin("maths.py", "1 / 0\n")
    fake.switch_on()
    for _ in range(2):
        assert fake.read_config(train_batch_size=1)._param_dict == {"train_batch_size": 1, "ours": 1}
        assert_only_expert_parallel_fails(fake, "ZeroDivisionError")
        importlib.reload(fake.load("runtime.config"))


def test_reload_of_a_mended_module_fits_again(fake):
    fake.write("maths.py", MATHS.replace("factor=2", "factor=3"))
    fake.twin("maths.py", TWIN)
    overlay = fake.switch_on()
    maths = fake.load("maths")
    assert overlay.extensions[0].state is State.DRIFT
    fake.write("maths.py", MATHS)
    importlib.reload(maths)
    fake.read_config(expert_parallel={"enabled": True})
    assert maths.double(3) == 7
