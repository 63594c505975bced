# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What a twin can change, when it is bound, and that nobody can tell an extended function from an ordinary one."""
import importlib
import importlib.machinery
import importlib.util
import inspect
import pickle
import pkgutil
import subprocess
import sys
import threading
import traceback

import pytest
from fake_package import PACKAGE
from interpreters import fresh_environment

from deepspeed_autoep.extension import State
from deepspeed_autoep.overlay import OverlayError

DOUBLE = """
@extends("double", feature="faster", why="one more than upstream's")
def double_and_one(x, factor=2):
    return double_and_one.original(x, factor) + 1
"""


def states(overlay):
    return {extension.target: extension.state for extension in overlay.extensions}


# --------------------------------------------------------------------------------------------- what can be extended


def test_function(fake):
    fake.twin("maths.py", DOUBLE)
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == 7
    assert fake.load("maths").double(3, factor=3) == 10
    assert states(overlay) == {"double": State.APPLIED}


@pytest.mark.parametrize("target, parameters, call, expected", [
    ("Counter.step", "self, by=1", lambda m: m.Counter().step(4), 104),
    ("Counter.zero", "start=0", lambda m: m.Counter.zero(5) + m.Counter().zero(5), 210),
    ("Counter.label", "cls, suffix=''", lambda m: m.Counter.label("!"), "Counter!100"),
    ("Counter.Inner.depth", "self", lambda m: m.Counter.Inner().depth(), 101),
])
def test_method_of_each_kind(fake, target, parameters, call, expected):
    names = ", ".join(parameter.split("=")[0] for parameter in parameters.split(", "))
    fake.twin("maths.py", f"""
        @extends("{target}", feature="f", why="a hundred more")
        def extension({parameters}):
            found = extension.original({names})
            return found + (100 if isinstance(found, int) else "100")
    """)  # yapf: disable
    overlay = fake.switch_on()
    assert call(fake.load("maths")) == expected
    assert states(overlay) == {target: State.APPLIED}


def test_extensions_of_one_target_stack_in_order(fake):
    fake.twin("maths.py", """
        @extends("double", feature="inner", why="it forwards its whole tail")
        def inner(*args, **kwargs):
            return inner.original(*args, **kwargs) + 1

        @extends("double", feature="outer", why="it names a parameter that the first one only forwards")
        def outer(x, *args, **kwargs):
            return outer.original(x, *args, **kwargs) * 100
    """)  # yapf: disable
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == 700
    assert [extension.state for extension in overlay.extensions] == [State.APPLIED] * 2


def test_decorator_that_hides_the_function(fake):
    """DeepSpeed's ``instrument_w_nvtx`` takes ``*args, **kwargs`` and does not say what it wraps."""
    fake.write(
        "deco.py", """
        def timed(function):
            def wrapped(*args, **kwargs):
                return function(*args, **kwargs)

            return wrapped
        """)
    fake.write(
        "maths.py", "from fakespeed.deco import timed\n\n\n@timed\n@timed\ndef double(x, factor=2):\n"
        "    return x * factor\n\n\n@timed\ndef any(*args, **kwargs):\n    return 1\n")
    fake.write("user.py", "from fakespeed.maths import double\n")
    fake.twin("maths.py", DOUBLE + "@extends('any', feature='f', why='w')\ndef any(*args, **kwargs):\n    return 2\n")
    fake.load("user")
    overlay = fake.switch_on()
    maths = fake.load("maths")
    assert states(overlay) == {"double": State.APPLIED, "any": State.APPLIED}
    assert (maths.double(3), maths.any()) == (7, 2)
    assert maths.double is fake.load("user").double is pickle.loads(pickle.dumps(maths.double))
    assert str(inspect.signature(maths.double)) == "(x, factor=2)"


def test_attribute_is_replaced(fake):
    fake.twin("maths.py", "LIMIT = replaces('LIMIT', 99, feature='f', why='w')\n")
    fake.switch_on()
    assert fake.load("maths").LIMIT == 99


def test_function_is_added_where_the_release_lacks_it(fake):
    fake.twin("maths.py", """
        @adds("Counter.leap", feature="f", why="w")
        def leap(self):
            return self.step(10)

        @adds("Counter.step", feature="f", why="w")
        def step(self, by=1):
            return None
    """)  # yapf: disable
    overlay = fake.switch_on()
    counter = fake.load("maths").Counter()
    assert states(overlay) == {"Counter.leap": State.APPLIED, "Counter.step": State.UPSTREAM}
    assert counter.leap() == fake.load("maths").Counter().step(10)


def test_new_module_is_importable_only_with_the_overlay(fake):
    fake.twin("runtime/fresh.py", "from fakespeed.maths import double\nVALUE = double(4)\n")
    with pytest.raises(ModuleNotFoundError):
        fake.load("runtime.fresh")
    fake.switch_on()
    fresh = fake.load("runtime.fresh")
    assert fresh.VALUE == 8 and fresh.__name__ == f"{PACKAGE}.runtime.fresh"
    assert importlib.reload(fresh) is fresh
    with pytest.raises(ModuleNotFoundError):
        fake.load("runtime.absent")


def test_class_imported_from_another_module_is_extended_there_only(fake):
    """Everyone else must keep meeting a class: for ``isinstance``, subclasses and pickle."""
    fake.write("user.py", "from fakespeed.maths import Counter\n\n\ndef make():\n    return Counter()\n")
    fake.twin("user.py", """
        @extends("Counter", feature="f", why="made with a mark")
        def counter():
            made = counter.original()
            made.mark = True
            return made
    """)  # yapf: disable
    fake.switch_on()
    made = fake.load("user").make()
    assert made.mark
    assert isinstance(fake.load("maths").Counter, type) and isinstance(made, fake.load("maths").Counter)
    assert pickle.loads(pickle.dumps(made)).mark
    assert pickle.loads(pickle.dumps(fake.load("user").Counter)) is fake.load("user").Counter


# ------------------------------------------------------------------------------------------- what need not be extended


@pytest.mark.parametrize("probe, state, doubled", [
    ("lambda module: module.double(1) == 2", State.UPSTREAM, 6),
    ("lambda module: module.double(1) == 3", State.APPLIED, 7),
    ("lambda module: module.gone", State.DRIFT, 6),
])
def test_probe_decides(fake, probe, state, doubled):
    fake.twin("maths.py", DOUBLE.replace("why=", f"unless={probe}, why="))
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == doubled
    assert states(overlay) == {"double": state}


def test_every_probe_sees_the_module_as_its_release_left_it(fake):
    unless = "unless=lambda module: module.LIMIT == 99"
    fake.twin(
        "maths.py", f"replaces('LIMIT', 99, feature='f', why='w', {unless})\n"
        f"replaces('untouched', 99, feature='f', why='w', {unless})\n")
    overlay = fake.switch_on()
    fake.load("maths")
    assert states(overlay) == {"LIMIT": State.APPLIED, "untouched": State.APPLIED}


def test_one_feature_is_left_out(fake, monkeypatch):
    fake.twin("maths.py", DOUBLE + "replaces('LIMIT', 99, feature='other', why='w')\n")
    monkeypatch.setenv("DS_AUTOEP_OFF", " faster,")
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == 6 and fake.load("maths").LIMIT == 99
    assert states(overlay) == {"double": State.OFF, "LIMIT": State.APPLIED}
    overlay.require_fit()


def test_an_unknown_feature_to_leave_out_is_refused(fake, monkeypatch):
    fake.twin("maths.py", DOUBLE)
    monkeypatch.setenv("DS_AUTOEP_OFF", "fatser")
    with pytest.raises(OverlayError, match="DS_AUTOEP_OFF: found fatser; allowed: faster"):
        fake.switch_on().require_fit()


# ------------------------------------------------------------------------------------------------------- when it binds

COPIES = {"__init__.py": "__version__ = '1.5.0'\nfrom .maths import double\n",
          "user.py": "from fakespeed.maths import double as twice\n"}  # yapf: disable


def test_switched_on_late(fake):
    """Copies made by ``from x import y`` follow, in the package itself and in the modules below it."""
    for path, text in COPIES.items():
        fake.write(path, text)
    fake.twin("maths.py", DOUBLE)
    upstream = fake.load("user").twice
    fake.switch_on()
    ours = fake.load("maths").double
    assert ours is not upstream
    assert fake.load().double is ours and fake.load("user").twice is ours


def test_switched_on_late_every_twin_is_bound_once(fake):
    """A twin may import a module that has a twin as well, or one that is new."""
    fake.twin("early.py", "import fakespeed.maths\nimport fakespeed.zzz_new\n")
    fake.write("early.py", "")
    fake.twin("maths.py", DOUBLE)
    fake.twin("zzz_new.py", "COUNTED.append(1)\n")
    fake.write("__init__.py", "__version__ = '1.5.0'\nimport builtins\nbuiltins.COUNTED = []\n")
    fake.load("early")
    overlay = fake.switch_on()
    assert fake.load("maths").double(3) == 7
    assert fake.load().builtins.COUNTED == [1]
    assert states(overlay) == {"double": State.APPLIED}
    del fake.load().builtins.COUNTED


def test_reload_binds_again_and_once(fake):
    fake.twin("maths.py", DOUBLE)
    overlay = fake.switch_on()
    maths = fake.load("maths")
    before = maths.double
    assert importlib.reload(maths).double is not before
    assert maths.double(3) == 7
    assert states(overlay) == {"double": State.APPLIED} and len(overlay.extensions) == 1


def test_threads_that_import_together_keep_their_extensions_apart(fake):
    meet = "import threading\nthreading.meeting.wait(10)\n"
    fake.write("other.py", "def triple(x):\n    return 3 * x\n")
    fake.twin("maths.py", meet + DOUBLE + meet)
    fake.twin("other.py", meet + DOUBLE.replace('"double"', '"triple"').replace("x, factor=2", "x") + meet)
    overlay = fake.switch_on()
    fake.load("runtime.config")
    threading.meeting = threading.Barrier(2)
    importers = [threading.Thread(target=fake.load, args=[name]) for name in ("maths", "other")]
    for thread in importers:
        thread.start()
    for thread in importers:
        thread.join()
    del threading.meeting
    assert {
        e.name: e.state
        for e in overlay.extensions
    } == {
        f"{PACKAGE}.maths.double": State.APPLIED,
        f"{PACKAGE}.other.triple": State.APPLIED
    }


# -------------------------------------------------------------------------------------- nobody can tell the difference


@pytest.fixture
def extended(fake):
    file = fake.twin(
        "maths.py", DOUBLE + """
@extends("Counter.step", feature="f", why="w")
def step(self, *args, **kwargs):
    \"\"\"Ours.\"\"\"
    return step.original(self, *args, **kwargs) // 0
""")
    fake.switch_on()
    return fake.load("maths"), file


def test_pickle_by_reference(extended):
    maths, _ = extended
    for function in (maths.double, maths.Counter.step):
        assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(maths.Counter().step)).__func__ is maths.Counter.step


def test_inspection(extended):
    maths, file = extended
    assert inspect.getsourcefile(maths.double) == str(file)
    assert "def double_and_one" in inspect.getsource(maths.double)
    assert "def untouched" in inspect.getsource(maths.untouched)
    assert "class Counter" in inspect.getsource(maths) and "extends" not in inspect.getsource(maths)
    assert str(inspect.signature(maths.double)) == "(x, factor=2)"
    assert str(inspect.signature(maths.Counter().step)) == "(by=1)"  # upstream's, not (*args, **kwargs)
    assert (maths.Counter.step.__qualname__, maths.Counter.step.__doc__) == ("Counter.step", "Ours.")
    assert inspect.getmodule(maths.double) is maths


def test_traceback_points_into_the_twin(extended):
    maths, file = extended
    with pytest.raises(ZeroDivisionError) as caught:
        maths.Counter().step(4)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename == str(file)
    assert frame.line == "return step.original(self, *args, **kwargs) // 0"
    assert file.read_text().splitlines()[frame.lineno - 1].strip() == frame.line


def test_module_looks_as_without_us(extended):
    maths, _ = extended
    assert isinstance(maths.__loader__, importlib.machinery.SourceFileLoader)
    assert maths.__spec__.loader is maths.__loader__
    assert b"class Counter" in pkgutil.get_data(PACKAGE, "maths.py")
    assert "class Counter" in importlib.util.find_spec(maths.__name__).loader.get_source(maths.__name__)


def test_no_warning_is_raised(fake):
    fake.twin("maths.py", DOUBLE)
    fake.twin("runtime/fresh.py", "")
    code = f"""
import sys
from deepspeed_autoep.finder import OverlayFinder
sys.path.insert(0, {str(fake.source.parent)!r})
sys.meta_path.insert(0, OverlayFinder({PACKAGE!r}, {str(fake.overlay_root)!r}, releases=(">=1", "1.5.0")))
import fakespeed.maths, fakespeed.runtime.config, fakespeed.runtime.fresh, importlib
assert importlib.reload(fakespeed.maths).double(3) == 7
fakespeed.runtime.config.DeepSpeedConfig({{"expert_parallel": {{"enabled": True}}}})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code],
                          env=fresh_environment(),
                          capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, "")
