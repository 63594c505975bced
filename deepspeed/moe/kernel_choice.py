# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which implementation this process uses for rows and for experts: asked once, and with the reason.

``TRITON_INTERPRET=1`` runs the kernels on CPU tensors, slowly, for tests and for finding faults.
"""
import functools
import importlib
import importlib.util
import os

import torch

from deepspeed_autoep.overlay import features_off

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # the kernels sum in float32


@functools.cache
def why_no_kernels():
    """Why this process has no Triton kernels, or None when it has."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not is_interpreted() and (torch.version.cuda is None or not torch.cuda.is_available()):
        return "there is no NVIDIA GPU"
    return None


@functools.cache
def why_no_grouped_gemm():
    """Why this process computes experts by the family's own forward, or None when it has fast grouped GEMMs."""
    if "expert-kernels" in features_off():
        return "DS_AUTOEP_OFF names expert-kernels"
    if why_no_kernels() is not None:
        return why_no_kernels()
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped GEMM"
    if not is_interpreted() and torch.cuda.get_device_capability() < (9, 0):
        return "grouped GEMMs are fast from compute capability 9.0, found {}.{}".format(
            *torch.cuda.get_device_capability())
    return None


def is_interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def row_kernels(tensor):
    """The module of kernels when it takes ``tensor``, else None."""
    device = "cpu" if is_interpreted() else "cuda"
    if tensor.device.type != device or why_no_kernels() is not None:
        return None
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        return None
    return _module()


@functools.cache
def _module():
    return importlib.import_module("deepspeed.moe.expert_kernels")
