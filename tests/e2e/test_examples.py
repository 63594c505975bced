# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The examples as a user starts them: real launchers, real processes, a script that knows nothing of the overlay."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RANKS, EP, STEPS = 2, 2, 8
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 8, 32, 16
# The first run on a machine also builds DeepSpeed's C++ extension.
TIMEOUT = 300
INHERITED = ("PATH", "HOME", "TMPDIR", "TORCH_EXTENSIONS_DIR", "LANG")


def environment(**extra):
    """Next to nothing of this process's environment: no PYTHONPATH, no switches of the overlay."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {**kept, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", **extra}


def run(command, cwd, timeout=TIMEOUT, **extra_environment):
    """Run ``command`` to its end; returns exit status and output. Ends all of its processes when it takes too long."""
    process = subprocess.Popen([str(part) for part in command], cwd=cwd, env=environment(**extra_environment),
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)  # yapf: disable
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} took more than {timeout} s:\n{output[-3000:]}")
    return process.returncode, output


def torchrun(python, script, *options):
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", EXAMPLES / script,
            *options]  # yapf: disable


def check_training(status, output, summary):
    """The run ended well, the loss fell on what it saw and what it did not see, each rank had its experts only."""
    assert status == 0, output[-5000:]
    figures = json.loads(summary.read_text())
    losses, (before, after) = figures["losses"], figures["held_out"]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) / 3 < losses[0] - 0.2, losses
    assert after < before - 0.2, figures["held_out"]
    whole = LAYERS * EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert [rank["expert_elements"] for rank in figures["ranks"]] == [whole // EP] * RANKS
    assert held_out_loss(summary.parent / "model") == pytest.approx(after, rel=1e-4)


@torch.no_grad()
def held_out_loss(folder):
    """The loss of the model that a run saved to ``folder``, in this process, which has whole experts."""
    import tiny_moe

    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    blocks = DataLoader(tiny_moe.datasets(model)[1], batch_size=4)
    return sum(model(**batch).loss.item() for batch in blocks) / len(blocks)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import tiny_moe

    folder = tmp_path_factory.mktemp("tiny_moe")
    tiny_moe.save_checkpoint(folder, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_experts=EXPERTS, head_dim=8,
                             moe_intermediate_size=INTERMEDIATE, max_position_embeddings=64)  # yapf: disable
    return folder


@pytest.fixture
def options(model, tmp_path):
    return [
        f"--model={model}", f"--steps={STEPS}", f"--summary={tmp_path / 'summary.json'}",
        f"--save={tmp_path / 'model'}"
    ]


CONFIG = f"--config={EXAMPLES / 'ds_zero3_ep.json'}"


@pytest.mark.parametrize("script", ["train.py", "trainer.py", "accelerate_train.py", "tiny_moe.py"])
def test_script_knows_nothing_of_the_overlay(script):
    assert "autoep" not in (EXAMPLES / script).read_text()


@pytest.mark.floor
@pytest.mark.parametrize("script", ["train.py", "trainer.py"])
def test_script_trains_with_expert_parallelism(script, options, tmp_path):
    check_training(*run(torchrun(sys.executable, script, CONFIG, *options), tmp_path), tmp_path / "summary.json")


def test_trainer_resumes_without_expert_parallelism(options, tmp_path):
    """From a checkpoint of the Trainer's, as if it had never stopped, and in other groups of parameters."""
    config = tmp_path / "config.json"
    block = json.loads((EXAMPLES / "ds_zero3_ep.json").read_text())
    config.write_text(json.dumps(block))
    command = torchrun(sys.executable, "trainer.py", f"--config={config}", *options, "--save-every=4")
    check_training(*run(command, tmp_path), tmp_path / "summary.json")
    losses = json.loads((tmp_path / "summary.json").read_text())["losses"]
    assert sorted(path.name for path in (tmp_path / "runs/trainer").iterdir()) == ["checkpoint-4", "checkpoint-8"]
    shutil.rmtree(tmp_path / "runs/trainer/checkpoint-8")
    config.write_text(json.dumps({**block, "expert_parallel": {**block["expert_parallel"], "enabled": False}}))
    status, output = run([*command, "--resume"], tmp_path)
    assert status == 0, output[-5000:]
    resumed = json.loads((tmp_path / "summary.json").read_text())["losses"]
    assert resumed == pytest.approx(losses, rel=1e-5)


def test_accelerate_launch_trains_with_expert_parallelism(options, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "examples/accelerate_zero3.yaml",
               "--main_process_port", free_port(),  # its default, 29500, may belong to another job on this machine
               "examples/accelerate_train.py", *options]  # yapf: disable
    check_training(*run(command, ROOT), tmp_path / "summary.json")


@pytest.fixture(scope="module")
def python_with_wheel(tmp_path_factory):
    """The Python of a fresh environment with our wheel, which sees the other packages but not their start-up lines."""
    folder = tmp_path_factory.mktemp("wheel")
    others = shutil.ignore_patterns(".*", "build", "runs", "tests", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=others)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for command in ([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source"],
                    [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]):  # yapf: disable
        status, output = run(command, folder)
        assert status == 0, output
    python, (wheel, ) = folder / "venv/bin/python", folder.glob("*.whl")
    status, output = run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    assert status == 0, output
    # Start-up lines in a folder that is added to the path are not run, so that only the wheel's own line is.
    (site_packages, ) = folder.glob("venv/lib/python*/site-packages")
    other_packages = Path(find_spec("torch").origin).parents[1]
    (site_packages / "other_packages.pth").write_text(f"{other_packages}\n")
    return python


def test_installing_the_wheel_switches_on_any_trainer_script(python_with_wheel, options, tmp_path):
    command = torchrun(python_with_wheel, "trainer.py", CONFIG, *options)
    check_training(*run(command, tmp_path), tmp_path / "summary.json")


@pytest.mark.skipif(Version(version("transformers")) < Version("5.24"), reason="DeepSpeed alone trains with this")
def test_switched_off_the_same_run_fails_as_deepspeed_alone_does(python_with_wheel, options, tmp_path):
    status, output = run(torchrun(python_with_wheel, "trainer.py", CONFIG, *options), tmp_path, DS_AUTOEP="0")
    assert status != 0
    assert "TypeError: _CanRecordRegistry.get() takes 2 positional arguments but 3 were given" in output


@pytest.mark.slow
def test_demo_learns_and_leaves_its_figures(tmp_path):
    status, output = run([sys.executable, EXAMPLES / "demo.py"], tmp_path, timeout=600)
    assert status == 0, output
    figures = json.loads((tmp_path / "runs/demo/ds_zero3_ep.figures.json").read_text())
    before, after = figures["held_out"]
    assert after < before - 1
    assert (tmp_path / "runs/demo/loss.png").read_bytes().startswith(b"\x89PNG")
    assert "Warning" not in output
    difference = re.search(r"largest difference of a logit: (\S+)", output)
    assert float(difference[1]) < 1e-4
    assert "a line of code, after so little training: def __init__(" in output
