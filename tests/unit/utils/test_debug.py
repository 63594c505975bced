# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The debug name tables find live objects by identity and hold none of them."""
import gc
import weakref

import deepspeed.utils.debug as debug
import pytest
import torch

from ranks import rank_group

one_rank = rank_group(1)
pytestmark = pytest.mark.floor


@pytest.fixture(params=["module_names", "param_names"])
def table(request):
    names = getattr(debug, request.param)
    names.clear()
    yield names
    names.clear()


@pytest.mark.parametrize("shape", [(), (0, ), (1, ), (3, ), (2, 2), (4, 1, 2)])
def test_tensors_of_any_shape_are_found_by_identity(table, shape):
    first, second = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    table[first] = "first"
    table[second] = "second"
    assert table[first] == "first" and table[second] == "second"
    assert torch.nn.Parameter(torch.zeros(shape)) not in table


def test_nothing_is_kept_alive(table):
    module = torch.nn.Linear(2, 2)
    table[module] = "linear"
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None and len(table) == 0


def test_a_recycled_id_has_no_name(table):
    """Objects of one size reuse each other's memory, and so each other's ids."""
    seen, recycled = set(), 0
    for _ in range(1000):
        module = torch.nn.Identity()
        recycled += id(module) in seen
        seen.add(id(module))
        assert module not in table
        table[module] = "stale"
        del module
    assert recycled, "no id was used twice: the case tests nothing"


def test_naming_an_object_again_replaces_its_name(table):
    module = torch.nn.Identity()
    table[module] = "old"
    table[module] = "new"
    assert table[module] == "new" and len(table) == 1


def test_extract_replaces_and_clear_empties_both_tables():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    debug.debug_extract_module_and_param_names(model)
    assert debug.debug_module2name(model[0]) == "0" and debug.debug_param2name(model[0].bias) == "0.bias"
    other = torch.nn.Linear(1, 1)
    debug.debug_extract_module_and_param_names(other)
    assert debug.debug_module2name(model[0]) == "unknown" and debug.debug_param2name(other.weight) == "weight"
    debug.debug_clear_module_and_param_names()
    assert len(debug.module_names) == len(debug.param_names) == 0


def table_sizes_around_destroy():
    """Sizes of the two tables while an engine lives and after ``destroy()``."""
    import deepspeed

    engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})[0]
    before = len(debug.module_names), len(debug.param_names)
    engine.destroy()
    return before, (len(debug.module_names), len(debug.param_names))


def test_destroying_an_engine_empties_both_tables(one_rank):
    assert one_rank.run(table_sizes_around_destroy) == [((1, 2), (0, 0))]
