# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Debug name tables that keep nothing alive.

The tables live as long as the process. When they hold the modules and parameters themselves, as in DeepSpeed up to
0.19.7, weights that expert-parallel replacement discards stay resident under their old names.
"""
import weakref

from deepspeed_autoep.extension import extends, replaces

_FEATURE = "debug-name-tables"


class NameTable:
    """Names of live objects, found by identity.

    An entry goes when its object does. Every lookup also checks that the entry still means the object asked for: an
    ``id`` is free for reuse as soon as its object is gone, and a stale name would be worse than none.
    """

    def __init__(self):
        self._entries = {}  # id -> (weak reference, name, finalizer)

    def __setitem__(self, obj, name):
        self._drop(id(obj))
        self._entries[id(obj)] = (weakref.ref(obj), name, weakref.finalize(obj, self._drop, id(obj)))

    def __getitem__(self, obj):
        reference, name, _ = self._entries[id(obj)]
        if reference() is not obj:
            raise KeyError(obj)
        return name

    def __contains__(self, obj):
        entry = self._entries.get(id(obj))
        return entry is not None and entry[0]() is obj

    def __len__(self):
        return len(self._entries)

    def clear(self):
        for key in list(self._entries):
            self._drop(key)

    def _drop(self, key):
        _, _, finalizer = self._entries.pop(key, (None, None, None))
        if finalizer is not None:
            finalizer.detach()


def _tables_hold_nothing(module):
    """Whether the loaded module's own table lets go of an object that nothing else holds."""

    class Probe:
        pass

    table = module.module_names
    probe = Probe()
    alive = weakref.ref(probe)
    table[probe] = "probe"
    del probe
    if alive() is None:
        return True
    table.pop(alive(), None)
    return False


_WHY = "replaced modules and parameters stay alive as keys of a module-level dict"
module_names = replaces("module_names", NameTable(), feature=_FEATURE, why=_WHY, unless=_tables_hold_nothing)
param_names = replaces("param_names", NameTable(), feature=_FEATURE, why=_WHY, unless=_tables_hold_nothing)


@extends("debug_clear_module_and_param_names", feature=_FEATURE, why=_WHY, unless=_tables_hold_nothing)
def debug_clear_module_and_param_names():
    module_names.clear()
    param_names.clear()


@extends("debug_extract_module_and_param_names", feature=_FEATURE, why=_WHY, unless=_tables_hold_nothing)
def debug_extract_module_and_param_names(model):
    debug_clear_module_and_param_names()
    for table, named in ((module_names, model.named_modules()), (param_names, model.named_parameters())):
        for name, obj in named:
            table[obj] = name
