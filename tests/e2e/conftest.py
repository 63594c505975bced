# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Lets the end-to-end tests import the examples' shared module, as the examples do."""
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
