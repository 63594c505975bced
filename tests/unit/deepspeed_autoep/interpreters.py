# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Fresh interpreters that find the same overlay as the tests do, installed or in a checkout."""
import os
import site
from pathlib import Path

import deepspeed_autoep


def fresh_environment(**environment):
    """Variables for an interpreter that finds the same ``deepspeed_autoep`` as this one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DS_AUTOEP")}
    root = str(Path(deepspeed_autoep.__file__).parents[1])
    if root not in site.getsitepackages():
        inherited["PYTHONPATH"] = root
    return {**inherited, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
