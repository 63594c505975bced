# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ``expert_parallel`` block of a DeepSpeed configuration, checked while it is read.

DeepSpeed ignores keys that it does not know and meets a wrong type wherever the value is first used. Here every key
is checked at once, on every rank alike, before the first collective.
"""
import dataclasses
import difflib
import re
from typing import Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError, field_validator

from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
from deepspeed.moe import ep_experts
from deepspeed.moe.reshard_exchange import DEFAULT_BUCKET_BYTES
from deepspeed.utils import logger
from deepspeed_autoep.extension import extends

_OWN_KEYS = {"reshard_bucket_bytes"}  # read by the overlay; DeepSpeed's parser passes over them


class ExpertParallelBlock(BaseModel):
    """Keys, types and values of the ``expert_parallel`` block. What each key means is DeepSpeed's documentation.

    ``reshard_bucket_bytes`` is this overlay's: the buffers, in bytes, through which weights move between ranks.
    """
    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = False
    autoep_size: int = Field(1, ge=1)
    expert_tensor_parallel_size: Literal[1] = 1
    validate_folding_routing: bool = False
    async_split_plan: bool = False
    preset_model: Optional[str] = None
    moe_layer_pattern: Optional[str] = None
    expert_pattern: Optional[str] = None
    router_pattern: Optional[str] = None
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = False
    route_norm: Optional[bool] = None
    route_scale: Union[int, FiniteFloat] = 1.0
    score_apply: Literal["auto", "pre", "post"] = "auto"
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    gate_up_impl: Literal["separate", "fused"] = "separate"
    comm_backend: Literal["comm", "deepep"] = "comm"
    comm_num_sm: int = Field(12, ge=1)
    comm_qp_margin: int = Field(4, ge=0)
    comm_max_tokens_per_rank: int = Field(0, ge=0)
    num_expert_groups: Optional[int] = Field(None, ge=1)
    num_limited_groups: Optional[int] = Field(None, ge=1)
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    top_k: Union[Literal["auto"], PositiveInt] = "auto"
    load_balance_coeff: None = None
    routed_scaling_factor: Union[Literal["auto"], int, float] = "auto"
    expert_w1: Optional[str] = Field(None, pattern=r"^[^.]+$")
    expert_w2: Optional[str] = Field(None, pattern=r"^[^.]+$")
    expert_w3: Optional[str] = Field(None, pattern=r"^[^.]+$")
    num_experts_attr: Optional[str] = Field(None, pattern=r"^[^.]+$")
    top_k_attr: Optional[str] = Field(None, pattern=r"^[^.]+$")
    has_shared_experts: Optional[bool] = None
    shared_experts_pattern: Optional[str] = None
    shared_experts_gate_pattern: Optional[str] = None
    expert_activation: Optional[str] = None
    reshard_bucket_bytes: int = Field(DEFAULT_BUCKET_BYTES, ge=1)

    @field_validator("preset_model")
    @classmethod
    def _known_preset(cls, value):
        if value is not None and value not in available_preset_names():
            raise ValueError(f"allowed: {', '.join(available_preset_names())}, or no preset_model at all")
        return value

    @field_validator("moe_layer_pattern")
    @classmethod
    def _regular_expression(cls, value):
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"allowed: a regular expression ({error})")
        return value

    @field_validator("expert_activation")
    @classmethod
    def _known_activation(cls, value):
        known = getattr(ep_experts, "EXPERT_ACTIVATIONS", None)  # 0.19.6 does not know the key
        if value is not None and known is not None and value not in known:
            raise ValueError(f"allowed: {', '.join(known)}")
        return value


def check_block(block):
    """Raise ValueError when the block has a key, a type or a value that no DeepSpeed run can use.

    Args:
        block: the ``expert_parallel`` block as it stands in the configuration, a dict.
    """
    problems = []
    known = {field.name for field in dataclasses.fields(AutoEPConfig)} | _OWN_KEYS
    newer = known - set(ExpertParallelBlock.model_fields)  # of a later DeepSpeed: left to its own checks
    try:
        ExpertParallelBlock.model_validate({key: value for key, value in block.items() if key not in newer})
    except ValidationError as error:
        found = {}  # a union reports once for each of its members
        for item in error.errors():
            found.setdefault(item["loc"][0], []).append(item)
        problems += [_describe(key, items) for key, items in found.items()]
    for key in sorted(set(block) & set(ExpertParallelBlock.model_fields) - known):
        problems.append(f"expert_parallel.{key}: found {block[key]!r}, but the installed DeepSpeed does not know this "
                        "key yet; allowed: a newer release, or leaving it out")
    if problems:
        raise ValueError("\n".join(problems))


def _describe(key, items):
    if items[0]["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(key), ExpertParallelBlock.model_fields, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        allowed = ", ".join(ExpertParallelBlock.model_fields)
        return f"expert_parallel.{key}: found an unknown key{meant}; allowed: {allowed}"
    messages = dict.fromkeys(item["msg"].replace("Input should be", "allowed:").replace("Value error, ", "")
                             for item in items)  # yapf: disable
    return f"expert_parallel.{key}: found {items[0]['input']!r}; {' or '.join(messages)}"


@extends("parse_autoep_config",
         feature="config-errors",
         why="an unknown key, a wrong type or an impossible value is an error that names key and value")
def parse_autoep_config(param_dict):
    if param_dict is not None and not isinstance(param_dict, dict):
        raise ValueError(f"expert_parallel: found {param_dict!r}; allowed: a block such as "
                         '{"enabled": true, "autoep_size": 2}')
    if param_dict and "enabled" not in param_dict:
        logger.warning(f"expert_parallel: found {param_dict!r} without \"enabled\": the model runs without expert "
                       "parallelism. Set \"enabled\" to true, or to false to say so.")
    if param_dict and param_dict.get("enabled"):
        check_block(param_dict)
    return parse_autoep_config.original(param_dict)
