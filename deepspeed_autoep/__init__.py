# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism x ZeRO-3 for Hugging Face MoE models, as an overlay on the installed DeepSpeed.

Importing this package switches the overlay on, before or after ``import deepspeed``; the wheel's start-up line does
it for every process, so that a training script needs no import of ours. ``DS_AUTOEP=0`` switches it off;
``DS_AUTOEP_OFF=name,name`` leaves out single features (``ds_autoep status`` lists them).

Nothing here may import DeepSpeed, torch or anything else slow: this runs at the start of every Python process.
"""
import os

__version__ = "0.1.0"

if os.environ.get("DS_AUTOEP", "1") != "0":
    from deepspeed_autoep.finder import install

    install()
