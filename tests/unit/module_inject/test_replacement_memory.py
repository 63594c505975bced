# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Replacing a layer frees its source and partitions its experts before the next layer is built."""
import deepspeed
import pytest
from packaging.version import Version

from ranks import rank_group
from init_memory import LAYER_BYTES, measure

four_ranks = rank_group(4)
four_ranks_without = rank_group(4, DS_AUTOEP_OFF="debug-name-tables,partitioned-experts")

pytestmark = pytest.mark.floor
faulty_release = pytest.mark.skipif(Version(deepspeed.__version__) >= Version("0.19.8"),
                                    reason="DeepSpeed 0.19.8 has neither of these faults")


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_peak_does_not_depend_on_the_number_of_layers(four_ranks, ep):
    few = four_ranks.run(measure, 2, ep)
    many = four_ranks.run(measure, 8, ep)
    for two, eight in zip(few, many):
        assert two["unpartitioned"] == eight["unpartitioned"] == 0
        assert eight["alive_after_replacement"] == eight["alive_after_init"] == 0
        # As many bytes come as go: experts partitioned over all ranks before and after. What may grow with the number
        # of layers is a router and its buffers, 2 KiB a layer.
        assert abs(eight["end"] - two["end"]) < 8 * 4096
        assert eight["replace"] - two["replace"] < 8 * 4096, (two, eight, LAYER_BYTES)


@faulty_release
@pytest.mark.parametrize("ep", [1, 2])
def test_the_faults_are_there_without_the_overlay(four_ranks_without, ep):
    for eight in four_ranks_without.run(measure, 8, ep):
        assert eight["alive_after_replacement"] == eight["alive_after_init"] == 1
        assert eight["unpartitioned"] == 7 * LAYER_BYTES // 4 // ep
