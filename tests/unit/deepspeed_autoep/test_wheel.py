# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The wheel: what it holds, and that installing it is all that it takes to switch the overlay on."""
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

OVERLAYS = ("accelerate", "deepspeed", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources: a build leaves files behind, and may pick up old ones."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*OVERLAYS, "deepspeed_autoep", "requirements"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, copy)
    subprocess.run([
        sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps",
        "--no-build-isolation", "--wheel-dir", target, copy
    ],
                   check=True)
    [file] = target.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The python of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site_packages)
    return folder / "bin/python"


def files_of(wheel):
    return [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]


def sources(folder):
    return [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]


def test_files(wheel):
    """Exactly our trees, the overlays inside the package, and the start-up line. Nothing in DeepSpeed's folder."""
    ours = [str(path) for path in sources("deepspeed_autoep")]
    overlay = [f"deepspeed_autoep/{path}" for name in OVERLAYS for path in sources(name)]
    others = [name for name in files_of(wheel) if ".dist-info/" not in name]
    data = ["deepspeed_autoep.pth", "deepspeed_autoep/families.json"]
    assert overlay and sorted(others) == sorted(ours + overlay + data)


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    text = {name.partition(".dist-info/")[2]: name for name in files_of(wheel) if ".dist-info/" in name}
    read = {name: archive.read(path).decode() for name, path in text.items()}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Root-Is-Purelib: true" in read["WHEEL"]
    assert "ds_autoep = deepspeed_autoep.cli:main" in read["entry_points.txt"]
    assert "deepspeed_autoep.pth," in read["RECORD"], "so that pip uninstall removes it"
    assert "Requires-Dist: deepspeed<0.20,>=0.19.6" in read["METADATA"]
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("variables, on", [({}, True), ({"DS_AUTOEP": "0"}, False)])
def test_installing_switches_on(installed, variables, on, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DS_AUTOEP", "PYTHON"))}
    code = "import sys; print('deepspeed_autoep.finder' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([installed, "-c", code],
                          cwd=tmp_path,
                          env={
                              **clean,
                              **variables
                          },
                          capture_output=True,
                          text=True)
    assert (done.stdout, done.stderr) == (f"{on} False\n", "")


@pytest.mark.parametrize("package", OVERLAYS)
def test_overlay_is_found_inside_the_package(installed, tmp_path, package):
    code = ("from deepspeed_autoep.finder import modules_below, overlay_root\n"
            f"root = overlay_root({package!r})\n"
            f"print(root, *sorted(modules_below(root, {package!r})), sep='\\n')")
    done = subprocess.run([installed, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    root, *names = done.stdout.splitlines()
    assert root.endswith(f"site-packages/deepspeed_autoep/{package}")
    assert names == sorted(str(path.with_suffix("")).replace("/", ".") for path in sources(package))


def test_without_deepspeed_its_import_fails_as_ever(installed, tmp_path):
    done = subprocess.run([installed, "-I", "-c", "import deepspeed.utils"],
                          cwd=tmp_path,
                          capture_output=True,
                          text=True)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'deepspeed'\n")
