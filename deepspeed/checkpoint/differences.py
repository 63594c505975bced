# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a message tells in what a checkpoint and a model differ."""


def first_of(names, count=3):
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def told(differences, count=3):
    """``what -> names`` in words, ``count`` names each; without what has no names."""
    return "; ".join(f"{what}: {first_of(names, count)}" for what, names in differences.items() if names)
