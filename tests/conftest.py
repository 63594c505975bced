# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Environment of every test process and of the processes that they start."""
import os
import sys
from importlib.metadata import version

# DeepSpeed's compiled operators are cached per user, not per release: one built by another release fails to load.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions", version("deepspeed")))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
