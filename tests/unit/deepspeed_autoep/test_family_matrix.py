# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``ds_autoep families``, the record behind it, and README's section made from the same record."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import fresh_environment
from tables import table_rows

from deepspeed_autoep import cli, family_matrix

ROOT = Path(__file__).parents[3]
FOUND = {
    "zaya": {"loss": 2.14e-7, "gradient": 1.66e-6, "weight": 0.0, "experts": 2},
    "gemma4:both": {"loss": 0.0, "gradient": 3e-5, "weight": 1.2e-7, "experts": 4},
    "gemma4": {"loss": 9.6e-8, "gradient": 1e-6, "weight": 0.00034, "experts": 1},
}  # yapf: disable
REFUSED = {"new-moe": "it is [new]", "alike": "it is [new]", "doge": "no matrices"}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The made-up record, in a checkout in which there is nothing else; the command reads it as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(family_matrix, "FILE", tmp_path / family_matrix.IN_CHECKOUT)
    family_matrix.FILE.parent.mkdir()
    family_matrix.write(FOUND, REFUSED)
    return family_matrix.FILE


def run(capsys, *arguments):
    code = cli.main(["families", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_write_and_read(record):
    matrix = family_matrix.read()
    assert list(matrix) == ["tested", "how", "families", "refused"]
    assert list(matrix["tested"]) == ["deepspeed", "transformers", "torch", "python"]
    assert all(set(found) <= set("0123456789.") for found in matrix["tested"].values()), "no +cpu"
    assert list(matrix["families"].items()) == [
        ("gemma4", {"loss": 1e-7, "gradient": 1e-6, "weight": 0.0003, "experts": 1}),
        ("gemma4:both", {"loss": 0.0, "gradient": 3e-5, "weight": 1e-7, "experts": 4}),
        ("zaya", {"loss": 2e-7, "gradient": 2e-6, "weight": 0.0, "experts": 2}),
    ]  # yapf: disable
    assert list(matrix["refused"].items()) == sorted(REFUSED.items())


def test_a_diff_shows_the_families_that_changed(record):
    before = record.read_text().splitlines()
    family_matrix.write(dict(reversed(FOUND.items()), gemma4={**FOUND["gemma4"], "loss": 9.7e-8}), REFUSED)
    assert record.read_text().splitlines() == before, "neither order nor further digits"
    family_matrix.write({**FOUND, "zaya": {**FOUND["zaya"], "experts": 3}}, REFUSED)
    changed = [pair for pair in zip(before, record.read_text().splitlines()) if pair[0] != pair[1]]
    assert [pair[1].strip()[:6] for pair in changed] == ['"zaya"']


def test_what_is_no_number_is_not_recorded(record):
    before = record.read_text()
    with pytest.raises(ValueError):
        family_matrix.write({"zaya": {**FOUND["zaya"], "loss": float("nan")}}, REFUSED)
    assert record.read_text() == before


def test_made_up_record_is_printed(record, capsys):
    code, printed, _ = run(capsys)
    assert code == 0
    assert table_rows(printed) == [
        ["gemma4", "1", "1e-07", "1e-06", "0.0003"],
        ["gemma4:both", "4", "0", "3e-05", "1e-07"],
        ["zaya", "2", "2e-07", "2e-06", "0"],
        ["alike", "it is [new]"],
        ["doge", "no matrices"],
        ["new-moe", "it is [new]"],
    ]
    assert printed.startswith("2 families (3 models) train with deepspeed ")


def test_every_family_and_version_is_printed(capsys):
    matrix = family_matrix.read()
    code, printed, _ = run(capsys)
    assert code == 0
    assert [row[0] for row in table_rows(printed)] == [*matrix["families"], *matrix["refused"]]
    printed = " ".join(printed.split())
    assert all(f"{name} {found}" in printed for name, found in matrix["tested"].items()) and matrix["how"] in printed


def test_json(capsys):
    code, printed, _ = run(capsys, "--json")
    assert code == 0
    assert printed == family_matrix.FILE.read_text() and json.loads(printed) == family_matrix.read()


@pytest.mark.parametrize("arguments", [[], ["--json"]])
@pytest.mark.parametrize("content, why", [(None, "No such file"), ("<<<<<<< HEAD", "Expecting value")])
def test_a_record_that_cannot_be_read(record, capsys, content, why, arguments):
    record.unlink() if content is None else record.write_text(content)
    code, printed, error = run(capsys, *arguments)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"ds_autoep families: cannot read {record} (") and why in error
    assert "make test-families" in error


def test_the_command_starts_without_what_is_slow_to_import():
    code = ("import sys; from deepspeed_autoep.cli import main; code = main(['families']); "
            "sys.exit(code or str({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], env=fresh_environment(), capture_output=True, text=True)
    assert done.stderr == "set()\n"


def test_refused_are_those_that_training_refuses():
    from deepspeed.moe.experts_interface import UNSUPPORTED_FAMILIES
    assert family_matrix.read(ROOT / family_matrix.IN_CHECKOUT)["refused"] == UNSUPPORTED_FAMILIES


def section(readme):
    before, _, rest = readme.read_text().partition(f"{family_matrix.BEGIN}\n")
    found, end, after = rest.partition(f"\n{family_matrix.END}\n")
    assert end, f"{readme} has no section"
    return before, found, after


def test_readme_is_up_to_date():
    matrix = family_matrix.read(ROOT / family_matrix.IN_CHECKOUT)
    _, found, _ = section(ROOT / "README.md")
    assert found == family_matrix.markdown(matrix), "run make families"
    assert found.count("\n") < 40 and max(map(len, found.splitlines())) <= 119


def test_section_of_a_readme(record):
    readme = record.parents[1] / "README.md"
    readme.write_text(f"before\n{family_matrix.BEGIN}\n{family_matrix.END}\nafter\n")
    for _ in range(2):  # the second time in place of what the first has written
        family_matrix.update(readme)
        before, found, after = section(readme)
        assert (before, after) == ("before\n", "after\n")
        assert found == family_matrix.markdown(family_matrix.read())
    words = " ".join(found.split())
    assert "loss 2e-07 (zaya), gradient 3e-05 (gemma4:both), weight 0.0003 (gemma4)" in words
    assert "gemma4, gemma4:both, zaya." in words
    assert found.endswith("* alike, new-moe: it is [new]\n* doge: no matrices")


@pytest.mark.parametrize("text", ["no markers", family_matrix.BEGIN, f"{family_matrix.END}\n{family_matrix.BEGIN}"])
def test_a_readme_without_the_section(record, text):
    readme = record.parents[1] / "README.md"
    readme.write_text(text)
    done = subprocess.run([sys.executable, "-m", "deepspeed_autoep.family_matrix", readme],
                          env=fresh_environment(),
                          capture_output=True,
                          text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"families: {readme}: found no section")
    assert readme.read_text() == text
