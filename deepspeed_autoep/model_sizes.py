# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of the parameters of a Mixture-of-Experts model, as ZeRO sees them after its MoE layers were replaced.

They are read off the model that a config.json describes, built on the meta device: nothing is allocated or loaded.
"""
import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Optional


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


class EstimateError(ValueError):
    """The question cannot be answered; the message names what was found and what is allowed."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as ZeRO sees it after the MoE layers were replaced.

    Args:
        name: name in the Hugging Face model; the two halves of a fused gate and up projection get ``[0]`` and ``[1]``.
        numel: elements, of all experts.
        layer: name of the decoder layer, or of the module for a parameter outside the layers.
        experts: number of experts that it holds in its first dimension; 0 for a dense parameter.
        router: whether it belongs to the router of a MoE layer.
    """
    name: str
    numel: int
    layer: str
    experts: int = 0
    router: bool = False

    def local(self, ep: int) -> int:
        """Elements that one rank sees of it when it is gathered."""
        return self.numel // ep if self.experts else self.numel

    def group_size(self, ranks: int, ep: int) -> int:
        """Over how many ranks ZeRO partitions it: the EDP group for experts, all ranks for others."""
        return ranks // ep if self.experts else ranks

    def shard(self, ranks: int, ep: int) -> int:
        """Elements of one rank's ZeRO-3 partition, padding included."""
        return ceil_div(self.local(ep), self.group_size(ranks, ep))

    def persistent(self, threshold: int, ep: int) -> bool:
        """Whether ZeRO-3 keeps it gathered."""
        return self.router or self.local(ep) <= threshold


@dataclass(frozen=True)
class ModelSizes:
    """The parameters of a model, in its own order."""
    parameters: tuple

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def expert_layers(self) -> dict:
        """Layer name -> number of experts, of every layer that has some."""
        return {p.layer: p.experts for p in self.parameters if p.experts}

    def without(self, parameters) -> "ModelSizes":
        """The same model without some of its parameters."""
        left_out = {p.name for p in parameters}
        return ModelSizes(tuple(p for p in self.parameters if p.name not in left_out))

    def layers(self) -> list:
        """Parameters by layer: one list for each."""
        return [list(layer) for _, layer in groupby(self.parameters, key=lambda p: p.layer)]


def read_model(path) -> ModelSizes:
    """Sizes of the model that a ``config.json``, or the directory that holds one, describes. Reads no weights.

    Raises:
        EstimateError: when there is no such file, no Transformers model of it, or a model without MoE layers.
    """
    values = _read_config(Path(path))
    model = _build_on_meta(values, path)
    sizes = ModelSizes(tuple(_parameters(model)))
    if not sizes.expert_layers:
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found no MoE layer in {type(model).__name__} of {path}; allowed: a "
                            "model with a module that has num_experts and parameters [num_experts, ., .]")
    return sizes


def _read_config(path):
    file = path / "config.json" if path.is_dir() else path
    allowed = "allowed: a config.json of a Transformers model, or a directory that holds one"
    if not file.is_file():
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found no file {file}; {allowed}")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found {file}, which is not JSON ({error}); {allowed}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found {file} without a model_type; {allowed}")
    return values


def _build_on_meta(values, path):
    import torch
    import transformers

    model_type = values["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found model_type {model_type!r} in {path}; allowed: a type that "
                            f"Transformers {transformers.__version__} knows")
    # A quantized checkpoint is trained in the dtype asked for.
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(values)
        with torch.device("meta"):
            return _auto_class(config).from_config(config)
    except Exception as error:  # every family checks its values in its own way
        raise EstimateError(f"CONFIG_OR_MODEL_DIR: found {path}, of which Transformers makes no {model_type} model "
                            f"({type(error).__name__}: {error}); allowed: a config.json that it can load") from error


def _auto_class(config):
    """The causal language model if there is one, else the auto class of the class in ``architectures``."""
    import transformers

    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText,
             transformers.AutoModelForSeq2SeqLM)  # yapf: disable
    if type(config) in kinds[0]._model_mapping:
        return kinds[0]
    for kind in kinds[1:]:
        if type(config) in kind._model_mapping:
            if kind._model_mapping[type(config)].__name__ in (config.architectures or ()):
                return kind
    return transformers.AutoModel


def _parameters(model):
    """Yield ``Parameter`` for every parameter of a model that was not replaced."""
    experts, routers = {}, set()
    for name, module in model.named_modules():
        count = _expert_count(module)
        if count is not None:
            experts[name] = count
            routers.update(_router_names(model, name, count))
    for name, param in model.named_parameters():
        owner = name.rpartition(".")[0]
        count = experts.get(owner)
        layer = re.match(r"(.*?\.\d+)\.", name)
        described = dict(layer=layer.group(1) if layer else owner)
        if count is None or not _holds_experts(name, param, count):
            yield Parameter(name, param.numel(), router=owner in routers, **described)
        elif "gate_up" in name:  # becomes two parameters, w1 and w3
            for half in (0, 1):
                yield Parameter(f"{name}[{half}]", param.numel() // 2, experts=count, **described)
        else:
            yield Parameter(name, param.numel(), experts=count, **described)


def _expert_count(module) -> Optional[int]:
    """``num_experts`` of a module that holds the weights of that many experts, else None."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        return None
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count]
    return count if weights else None


def _holds_experts(name, param, count):
    is_bias = param.dim() == 2 and name.endswith("bias")
    return (param.dim() == 3 or is_bias) and param.shape[0] == count


def _router_names(model, experts_name, count):
    """Names of the modules beside the experts that have a row of weights for each expert."""
    block_name = experts_name.rpartition(".")[0]
    for name, module in model.get_submodule(block_name).named_children():
        weights = [p for p in module.parameters(recurse=False) if p.dim() == 2 and p.shape[0] == count]
        if weights:
            yield f"{block_name}.{name}" if block_name else name
