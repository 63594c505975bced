# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the rest of the configuration must be when expert parallelism is enabled.

Reading the configuration is the first thing that ``zero.Init`` and ``deepspeed.initialize`` do, so what is refused
here is refused on every rank before a model is built, a process group made or anything sent.
"""
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed_autoep.extension import extends


def _divisors(number):
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _unsupported_with_zero3(config):
    """Yield (key, found, allowed) for what DeepSpeed cannot combine with expert parallelism under ZeRO stage 3."""
    zero = config.zero_config
    yield "zero_optimization.zero_quantized_gradients", zero.zero_quantized_gradients, False
    yield "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size, 1
    yield "sequence_parallel_size", config._param_dict.get("sequence_parallel_size", 1), 1
    yield "compile.autoep_non_moe", getattr(config.compile_config, "autoep_non_moe", False), False


def check_topology(config):
    """Raise ValueError when the expert-parallel degree or another block rules out expert parallelism.

    Args:
        config: a DeepSpeedConfig whose ``expert_parallel`` block is enabled and valid in itself.
    """
    degree = config.expert_parallel_config.autoep_size
    if dist.is_initialized() and dist.get_world_size() % degree != 0:
        ranks = dist.get_world_size()
        raise ValueError(f"expert_parallel.autoep_size: found {degree} with {ranks} ranks; allowed: a divisor of the "
                         f"number of ranks, {_divisors(ranks)}, that also divides the number of experts")
    accelerator = get_accelerator()
    if getattr(config.expert_parallel_config, "async_split_plan", False) and accelerator.Event is None:
        raise ValueError("expert_parallel.async_split_plan: found True on the accelerator "
                         f"'{accelerator.device_name()}', which has no events; allowed: False")
    if config.zero_optimization_stage != 3:
        return
    problems = [
        f"{key}: found {found!r} with expert_parallel and ZeRO stage 3; allowed: {allowed!r}"
        for key, found, allowed in _unsupported_with_zero3(config) if found != allowed
    ]
    if problems:
        raise ValueError("\n".join(problems))


@extends("DeepSpeedConfig._do_error_check",
         feature="config-errors",
         why="a degree that does not divide the ranks, or what ZeRO-3 cannot combine with it, is refused at once")
def _do_error_check(self):
    _do_error_check.original(self)
    if self.expert_parallel_config.enabled:
        check_topology(self)
