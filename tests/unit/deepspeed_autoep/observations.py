# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""What a fresh interpreter sees of DeepSpeed, with and without the overlay. Run by test_overlay_on_deepspeed.py.

DeepSpeed takes seconds to import, so each interpreter answers many questions at once.
"""
import contextlib
import importlib
import io
import linecache
import os
import pickle
import sys
import types

EXPERT_PARALLEL = {"enabled": True, "autoep_size": 1, "preset_model": "qwen3_moe"}


def _import_everything():
    """Import DeepSpeed and every module with a twin; return the paths that cannot be imported."""
    import deepspeed  # noqa: F401

    from deepspeed_autoep.finder import modules_below, overlay_root
    absent = []
    for name in modules_below(overlay_root("deepspeed"), "deepspeed"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            absent.append(name)
    return absent


def _code_of_ours(value):
    """``file:name`` of a function from the overlay, the class of another value of ours, or None."""
    import deepspeed_autoep
    from deepspeed_autoep.finder import overlay_root
    folders = (overlay_root("deepspeed") + os.sep, os.path.dirname(deepspeed_autoep.__file__) + os.sep)
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
    files = modules_below(overlay_root("deepspeed"), "deepspeed")
    found = {}
    for name, module in list(sys.modules.items()):
        if (name + ".").startswith("deepspeed.") and isinstance(module, types.ModuleType):
            if getattr(module, "__file__", None) == files.get(name, ""):
                continue  # a new module
            found |= {path: _layers(value) for path, value in _attributes(module) if _layers(value)}
    return found


def _declared():
    from deepspeed_autoep.finder import installed_finders
    finder = next(iter(installed_finders()), None)
    return finder and [
        dict(feature=e.feature,
             module=e.module,
             name=e.name,
             code=_code_of_ours(e.replacement),
             state=e.state.name,
             reason=e.reason) for e in finder.overlay.extensions
    ]


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
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled: a minute, for a single rank
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


def everything():
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        absent = _import_everything()
    faces, sources = _faces()
    return {
        "absent": absent,
        "warnings": sorted(f"{w.category.__name__} {w.filename}:{w.lineno} {w.message}" for w in caught),
        "faces": faces,
        "sources": sources,
        "footprint": _footprint(),
        "declared": _declared(),
        "status": _status(),
        "error": read_configs(),
        "losses": {
            str(stage): _losses(stage)
            for stage in (0, 3)
        },
    }


def without_feature():
    _import_everything()
    return {"declared": _declared(), "footprint": _footprint()}


def late():
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
    for name in ("deepspeed.module_inject.auto_ep", "deepspeed.runtime.zero.parameter_offload",
                 "deepspeed.utils.debug"):
        importlib.reload(sys.modules[name])
    finders = [type(finder).__name__ for finder in sys.meta_path].count("OverlayFinder")
    return {"once": once, "twice": twice, "reloaded": _footprint(), "finders": finders, "holders": holders,
            "twins": sorted(m for m in sys.modules if m.startswith("deepspeed_autoep.deepspeed."))}  # yapf: disable


def read_configs():
    """The error of a configuration that enables expert parallelism, after two that do not."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from deepspeed_autoep.overlay import OverlayError
    for block in ({}, {"expert_parallel": {**EXPERT_PARALLEL, "enabled": False}}):
        DeepSpeedConfig({"train_batch_size": 1, **block})
    try:
        DeepSpeedConfig({"train_batch_size": 1, "expert_parallel": EXPERT_PARALLEL})
    except OverlayError as error:
        return str(error)
    return None


def changed_signatures():
    import deepspeed.module_inject.auto_ep
    import deepspeed.module_inject.auto_ep_layer
    auto_ep, layer = deepspeed.module_inject.auto_ep, deepspeed.module_inject.auto_ep_layer
    auto_ep.AutoEP.ep_parser = lambda self, strict=True: []
    del layer._copy_parameter_data
    os.environ["DS_AUTOEP"] = "1"
    import deepspeed_autoep  # noqa: F401
    return {"error": read_configs(), "footprint": _footprint(), "status": _status()}


def other_release(found):
    import importlib.metadata
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: found if name == "deepspeed" else installed(name)
    os.environ["DS_AUTOEP"] = "1"
    import deepspeed_autoep  # noqa: F401
    _import_everything()
    return {"error": read_configs(), "footprint": _footprint(), "status": _status(), "losses": _losses(3)}
