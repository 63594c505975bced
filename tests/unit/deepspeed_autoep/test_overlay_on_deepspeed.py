# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The overlay on the installed DeepSpeed: exactly what ``ds_autoep status`` lists is ours, all else is as before."""
from importlib.util import find_spec

import observations
import pytest
from tables import table_rows

pytestmark = pytest.mark.floor

GUARD = "deepspeed.runtime.config.DeepSpeedConfig.__init__"
FEATURE = "partitioned-experts"  # shares targets with other features


@pytest.fixture(scope="module")
def on(fresh):
    return fresh(observations.everything)


@pytest.fixture(scope="module")
def off(fresh):
    return fresh(observations.everything, DS_AUTOEP="0")


@pytest.fixture(scope="module")
def late(fresh):
    return fresh(observations.late, DS_AUTOEP="0")


@pytest.fixture(scope="module")
def other_release(fresh):
    return fresh(observations.other_release, "0.20.1", DS_AUTOEP="0")


def applied(observed):
    return {e["name"] for e in observed["declared"] if e["state"] == "APPLIED"}


def test_everything_fits_this_release(on):
    misfits = [e for e in on["declared"] if e["state"] not in ("APPLIED", "UPSTREAM")]
    assert not misfits and applied(on)


def test_what_is_ours_is_what_the_status_lists(on):
    """Any other attribute of ours may only be a ``from x import y`` copy of a listed one."""
    listed = {name: on["footprint"].get(name) for name in applied(on)}
    assert None not in listed.values(), listed
    others = {name: layers for name, layers in on["footprint"].items() if name not in listed}
    assert others.pop(GUARD) == ["overlay.py:guarded"]
    assert all(layers in listed.values() for layers in others.values()), others


def test_every_applied_extension_is_a_layer_of_its_target(on):
    for e in on["declared"]:
        assert (e["code"] in on["footprint"].get(e["name"], [])) == (e["state"] == "APPLIED"), e


def test_off_is_untouched(on, off):
    assert off["footprint"] == {} and off["declared"] is None
    assert on["absent"] == ([] if find_spec("triton") else ["deepspeed.moe.expert_kernels"])
    new_modules = set(off["absent"])
    assert new_modules and not new_modules & {e["module"] for e in on["declared"]}


def test_feature_off_leaves_out_that_feature_only(fresh, on):
    without = fresh(observations.without_feature, DS_AUTOEP_OFF=FEATURE)
    assert {e["feature"] for e in without["declared"] if e["state"] == "OFF"} == {FEATURE}
    of_feature = {(e["name"], e["code"]) for e in on["declared"] if e["feature"] == FEATURE}
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
    assert late["twins"] == sorted({f"deepspeed_autoep.{e['module']}" for e in on["declared"]}), "no new module twice"


def test_copies_of_an_extended_function_are_replaced(on, late):
    target = "deepspeed.utils.debug.debug_extract_module_and_param_names"
    if target in applied(on):
        assert "deepspeed.runtime.engine.debug_extract_module_and_param_names" in late["once"]
        assert late["holders"] == []
    else:
        assert "deepspeed.utils.debug" in late["holders"]


def test_switching_on_twice_and_reloading_bind_once(late):
    assert late["finders"] == 3  # of DeepSpeed, Transformers and Accelerate
    assert late["twice"] == late["once"] == late["reloaded"]


def test_changed_signatures(fresh):
    drifted = fresh(observations.changed_signatures, DS_AUTOEP="0")
    for part in ("auto_ep.AutoEP.ep_parser: found (self, strict=True), expected (self)",
                 "auto_ep_layer._copy_parameter_data: found no _copy_parameter_data", "pip install 'deepspeed==0.19."):
        assert part in drifted["error"], drifted["error"]
    assert drifted["error"].count("\n  deepspeed.") == 3  # two features extend ep_parser
    assert "deepspeed.module_inject.auto_ep.AutoEP.ep_parser" not in drifted["footprint"]
    assert drifted["status"][0] == 1 and "does not fit" in drifted["status"][1]


def test_other_release(other_release):
    for part in ("deepspeed.runtime.engine.*: found deepspeed 0.20.1, expected deepspeed>=0.19.6,<0.20",
                 "does not fit deepspeed 0.20.1", "pip install 'deepspeed==0.19."):
        assert part in other_release["error"], other_release["error"]
    assert list(other_release["footprint"]) == [GUARD]
    assert other_release["status"][0] == 1 and "deepspeed 0.20.1" in other_release["status"][1]


def test_expert_parallel_configuration_is_read_when_everything_fits(on, off):
    assert on["error"] is None and off["error"] is None


def test_status(on, off):
    code, printed = on["status"]
    assert code == 0
    rows = table_rows(printed)
    states = {"APPLIED": "applied", "UPSTREAM": "already upstream"}
    expected = sorted((e["feature"], e["name"], states[e["state"]]) for e in on["declared"])
    beside = [("hf-checkpoint", "accelerate.accelerator.Accelerator.get_state_dict", "applied"),
              ("hf-import", "transformers.modeling_utils.PreTrainedModel._load_pretrained_model", "applied")]
    assert sorted(tuple(row[:3]) for row in rows) == sorted(expected + beside)
    assert all(row[3] for row in rows)
    assert off["status"] == [0, "The overlay is off (DS_AUTOEP=0): DeepSpeed is as installed.\n"]
