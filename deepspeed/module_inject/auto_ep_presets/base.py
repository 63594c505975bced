# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Router-logit recorders on Transformers releases whose recorder registry is not a plain dict.

Transformers 5.24 keys its registry by model and gives it a ``get`` without a default, so it is read and restored
here through ``dict``'s own methods, which mean the same on every release.
"""
import contextlib
from types import SimpleNamespace

from torch import nn

from deepspeed_autoep.extension import extends


def _copes_with_keyed_registry(module):

    class Registry(dict):

        def get(self, model):
            raise TypeError

    capturing = SimpleNamespace(_CAN_RECORD_REGISTRY=Registry(), maybe_install_capturing_hooks=lambda model: None)
    try:
        return module._install_instance_transformers_output_recorders(nn.Module(), {"key": {}}, capturing, lambda m: 0)
    except TypeError:
        return False


@contextlib.contextmanager
def _overridden(registry, entries):
    """Let ``registry`` hold ``entries`` inside the block, and exactly what it held before afterwards."""
    before = dict(registry)
    dict.update(registry, entries)
    try:
        yield
    finally:
        dict.clear(registry)
        dict.update(registry, before)


@extends("_install_instance_transformers_output_recorders",
         feature="output-recorders",
         why="Transformers 5.24 stops deepspeed.initialize with a TypeError: its registry's get() takes no default",
         unless=_copes_with_keyed_registry)
def _install_instance_transformers_output_recorders(model, registry_entries, output_capturing,
                                                    remove_output_capture_hooks):
    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    install_hooks = getattr(output_capturing, "maybe_install_capturing_hooks", None)
    if not isinstance(registry, dict) or install_hooks is None:
        return False
    remove_output_capture_hooks(model)
    for module in (model, *model.modules()):
        vars(module).pop("_output_capturing_hooks_installed", None)  # Transformers installs hooks once only
    with _overridden(registry, registry_entries):
        install_hooks(model)
    return True
