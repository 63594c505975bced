# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The overlay on the installed DeepSpeed: exactly what ``ds_autoep status`` lists is ours, everything else is as before.

DeepSpeed takes seconds to import, so each fresh interpreter answers many questions at once.
"""
import contextlib
import importlib
import io
import linecache
import os
import pickle
import sys
import types

import pytest

pytestmark = pytest.mark.floor

GUARD = "deepspeed.runtime.config.DeepSpeedConfig.__init__"
EXPERT_PARALLEL = {"enabled": True, "autoep_size": 1, "preset_model": "qwen3_moe"}
FEATURE = "partitioned-experts"  # shares targets with other features

# ------------------------------------------------------------------------------ these run in a fresh interpreter


def _import_everything():
    """Import DeepSpeed and every module with a twin; return the paths that cannot be imported."""
    import deepspeed  # noqa: F401

    from deepspeed_autoep.finder import modules_below, overlay_root
    absent = []
    for name in modules_below(overlay_root(), "deepspeed"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            absent.append(name)
    return absent


def _code_of_ours(value):
    """``file:name`` of a function from the overlay, the class of another value of ours, or None."""
    import deepspeed_autoep
    from deepspeed_autoep.finder import overlay_root
    folders = (overlay_root() + os.sep, os.path.dirname(deepspeed_autoep.__file__) + os.sep)
    value = getattr(value, "__func__", getattr(value, "fget", value))
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{os.path.basename(code.co_filename)}:{code.co_name}" if code.co_filename.startswith(folders) else None
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__.startswith("deepspeed_autoep.") else None


def _layers(value):
    """What ``value`` is made of, outermost first: one entry per extension of ours."""
    found = []
    while _code_of_ours(value):
        found.append(_code_of_ours(value))
        value = getattr(getattr(value, "__func__", value), "original", None)
    return found


def _attributes(module):
    for name, value in list(vars(module).items()):
        yield f"{module.__name__}.{name}", value
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                yield f"{module.__name__}.{name}.{attribute}", member


def _footprint():
    """Every attribute of a DeepSpeed module that comes from us, and its layers."""
    from deepspeed_autoep.finder import modules_below, overlay_root
    files = modules_below(overlay_root(), "deepspeed")
    found = {}
    for name, module in list(sys.modules.items()):
        if (name + ".").startswith("deepspeed.") and isinstance(module, types.ModuleType):
            if getattr(module, "__file__", None) == files.get(name, ""):
                continue  # a new module
            found |= {path: _layers(value) for path, value in _attributes(module) if _layers(value)}
    return found


def _declared():
    from deepspeed_autoep.finder import installed_finder
    finder = installed_finder()
    return finder and [[e.feature, e.name, _code_of_ours(e.replacement), e.state.name, e.reason]
                       for e in finder.overlay.extensions]  # yapf: disable


def _status():
    from deepspeed_autoep import cli
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(["status"])
    return [code, printed.getvalue()]


def _losses(stage):
    """Losses of a job without ``expert_parallel``, to the last digit."""
    import torch

    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}  # yapf: disable
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed("gloo", False, init_method=f"file://{os.path.abspath('store')}", rank=0, world_size=1)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses = []
    for _ in range(4):
        loss = engine(torch.randn(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    engine.destroy()
    return losses


def _faces():
    """How extended functions look to pickle and inspect, and the sources of a class with one extended method."""
    import inspect

    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    faces = {}
    for function in (AutoEP.ep_parser, AutoEPMoELayer.__init__):
        code = function.__code__
        first = linecache.getline(inspect.getsourcefile(function), code.co_firstlineno)
        assert inspect.getsource(function).startswith(first) and first.lstrip().startswith(("@", "def "))
        assert pickle.loads(pickle.dumps(function)) is function
        faces[function.__qualname__] = [str(inspect.signature(function)), function.__module__, _code_of_ours(function)]
    return faces, {
        name: inspect.getsource(member)
        for name, member in vars(AutoEP).items() if isinstance(member, types.FunctionType)
    }


def observe():
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        absent = _import_everything()
    losses = {str(stage): _losses(stage) for stage in (0, 3)}
    faces, sources = _faces()
    return {
        "absent": absent,
        "warnings": sorted(f"{w.category.__name__} {w.filename}:{w.lineno} {w.message}" for w in caught),
        "losses": losses,
        "faces": faces,
        "sources": sources,
        "status": _status(),
        "declared": _declared(),
        "footprint": _footprint(),
    }


def observe_without_feature():
    _import_everything()
    return {"declared": _declared(), "footprint": _footprint()}


def observe_late():
    """Switched on after ``import deepspeed``; then again, and over reloads."""
    import deepspeed  # noqa: F401
    import deepspeed.utils.debug
    upstream = deepspeed.utils.debug.debug_extract_module_and_param_names
    assert "deepspeed_autoep" not in sys.modules
    os.environ["DS_AUTOEP"] = "1"
    import deepspeed_autoep
    holders = [name for name, module in list(sys.modules.items())
               if name.startswith("deepspeed.") and upstream in list(vars(module).values())]  # yapf: disable
    _import_everything()
    once = _footprint()
    importlib.reload(deepspeed_autoep)
    deepspeed_autoep.install()
    twice = _footprint()
    for name in ("deepspeed.module_inject.auto_ep", "deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.debug"):
        importlib.reload(sys.modules[name])
    finders = [type(finder).__name__ for finder in sys.meta_path].count("OverlayFinder")
    return {"once": once, "twice": twice, "reloaded": _footprint(), "finders": finders, "holders": holders,
            "copies": sorted(m for m in sys.modules if m.startswith("deepspeed_autoep.deepspeed."))}  # yapf: disable


def _read_configs():
    """The error of a configuration that enables expert parallelism, after two that do not."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from deepspeed_autoep.overlay import OverlayError
    for block in ({}, {"expert_parallel": {**EXPERT_PARALLEL, "enabled": False}}):
        DeepSpeedConfig({"train_batch_size": 1, **block})
    try:
        DeepSpeedConfig({"train_batch_size": 1, "expert_parallel": EXPERT_PARALLEL})
    except OverlayError as error:
        return str(error)


def observe_changed_signatures():
    import deepspeed.module_inject.auto_ep
    import deepspeed.module_inject.auto_ep_layer
    auto_ep, layer = deepspeed.module_inject.auto_ep, deepspeed.module_inject.auto_ep_layer
    auto_ep.AutoEP.ep_parser = lambda self, strict=True: []
    del layer._copy_parameter_data
    os.environ["DS_AUTOEP"] = "1"
    import deepspeed_autoep  # noqa: F401
    return {"error": _read_configs(), "footprint": _footprint(), "status": _status()}


def observe_other_release(found):
    import importlib.metadata
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: found if name == "deepspeed" else installed(name)
    os.environ["DS_AUTOEP"] = "1"
    import deepspeed_autoep  # noqa: F401
    _import_everything()
    return {"error": _read_configs(), "footprint": _footprint(), "status": _status(), "losses": _losses(3)}


# --------------------------------------------------------------------------------------------- and these compare


@pytest.fixture(scope="module")
def on(fresh):
    return fresh(observe)


@pytest.fixture(scope="module")
def off(fresh):
    return fresh(observe, DS_AUTOEP="0")


@pytest.fixture(scope="module")
def late(fresh):
    return fresh(observe_late, DS_AUTOEP="0")


@pytest.fixture(scope="module")
def other_release(fresh):
    return fresh(observe_other_release, "0.20.1", DS_AUTOEP="0")


def applied(observed):
    return {name for _, name, _, state, _ in observed["declared"] if state == "APPLIED"}


def test_everything_fits_this_release(on):
    misfits = [extension for extension in on["declared"] if extension[3] == "DRIFT"]
    assert not misfits and applied(on)


def test_what_is_ours_is_what_the_status_lists(on):
    """Any other attribute of ours may only be a ``from x import y`` copy of a listed one."""
    listed = {name: on["footprint"].get(name) for name in applied(on)}
    assert None not in listed.values(), listed
    others = {name: layers for name, layers in on["footprint"].items() if name not in listed}
    assert others.pop(GUARD) == ["overlay.py:guarded"]
    assert all(layers in listed.values() for layers in others.values()), others


def test_every_applied_extension_is_a_layer_of_its_target(on):
    for _, name, code, state, _ in on["declared"]:
        assert (code in on["footprint"].get(name, [])) == (state == "APPLIED"), name


def test_off_is_untouched(on, off):
    assert off["footprint"] == {} and off["declared"] is None
    assert on["absent"] == []
    new_modules = set(off["absent"])
    assert new_modules and not new_modules & {name.rpartition(".")[0] for _, name, *_ in on["declared"]}


def test_feature_off_leaves_out_that_feature_only(fresh, on):
    without = fresh(observe_without_feature, DS_AUTOEP_OFF=FEATURE)
    assert {feature for feature, *_, state, _ in without["declared"] if state == "OFF"} == {FEATURE}
    of_feature = {(name, code) for feature, name, code, *_ in on["declared"] if feature == FEATURE}
    expected = {name: [code for code in layers if (name, code) not in of_feature]
                for name, layers in on["footprint"].items()}  # yapf: disable
    assert without["footprint"] == {name: layers for name, layers in expected.items() if layers}


def test_losses_of_an_ordinary_job_are_the_same_to_the_last_digit(on, off, other_release):
    assert len(set(on["losses"]["3"])) == 4
    assert on["losses"] == off["losses"]
    assert other_release["losses"] == off["losses"]["3"]


def test_import_raises_no_warning_of_ours(on, off):
    assert on["warnings"] == off["warnings"]


def test_extended_functions_look_like_upstreams(on, off):
    for name, (signature, module, code) in on["faces"].items():
        assert [signature, module] == off["faces"][name][:2]
        assert code is not None and off["faces"][name][2] is None
    names = {name.removeprefix("deepspeed.module_inject.auto_ep.AutoEP.") for name in applied(on)}
    changed = {name for name in off["sources"] if on["sources"][name] != off["sources"][name]}
    assert changed == names & set(off["sources"]) != set(off["sources"])


def test_switching_on_late_is_the_same(on, late):
    assert late["once"] == on["footprint"]
    assert not set(on["declared"][0]) & set(late["copies"])
    assert {name.removeprefix("deepspeed_autoep.") for name in late["copies"]
            } == {name.rpartition(".")[0] for name in _modules(on)}


def _modules(observed):
    return observed["footprint"]


def test_copies_of_an_extended_function_are_replaced(on, late):
    target = "deepspeed.utils.debug.debug_extract_module_and_param_names"
    if target in applied(on):
        assert "deepspeed.runtime.engine.debug_extract_module_and_param_names" in late["once"]
        assert late["holders"] == []
    else:
        assert "deepspeed.utils.debug" in late["holders"]


def test_switching_on_twice_and_reloading_bind_once(late):
    assert late["finders"] == 1
    assert late["twice"] == late["once"] == late["reloaded"]


def test_changed_signatures(fresh):
    drifted = fresh(observe_changed_signatures, DS_AUTOEP="0")
    for part in ("auto_ep.AutoEP.ep_parser: found (self, strict=True), expected (self)",
                 "auto_ep_layer._copy_parameter_data: found no _copy_parameter_data", "pip install 'deepspeed==0.19."):
        assert part in drifted["error"], drifted["error"]
    assert drifted["error"].count("\n  deepspeed.") == 2
    assert "deepspeed.module_inject.auto_ep.AutoEP.ep_parser" not in drifted["footprint"]
    assert drifted["status"][0] == 1 and "does not fit" in drifted["status"][1]


def test_other_release(other_release):
    for part in ("deepspeed.runtime.engine.*: found deepspeed 0.20.1, expected deepspeed>=0.19.6,<0.20",
                 "does not fit deepspeed 0.20.1", "pip install 'deepspeed==0.19."):
        assert part in other_release["error"], other_release["error"]
    assert list(other_release["footprint"]) == [GUARD]
    assert other_release["status"][0] == 1 and "deepspeed 0.20.1" in other_release["status"][1]


def test_expert_parallel_configuration_is_read_when_everything_fits(fresh):
    assert fresh(_read_configs) is None


def test_status(on, off):
    code, printed = on["status"]
    assert code == 0
    flat = "".join(character for character in printed if not character.isspace() and character != "│")
    for feature, name, _, state, _ in on["declared"]:
        assert feature in printed
        assert {"APPLIED": "applied", "UPSTREAM": "already upstream"}[state] in printed
    assert flat
    assert off["status"] == [0, "The overlay is off (DS_AUTOEP=0): DeepSpeed is as installed.\n"]
