# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Recognising a family's experts module, its per-expert parameters and its router, whatever their names and classes.

Transformers marks every instance of a class on its experts interface (``use_experts_implementation``) with flags.
They say which tensors the module has, and so which of its parameters belong to one expert each.
"""
import inspect

import torch

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm", "_is_expert_parallel")

_NO_DISPATCH = "its experts take rows that the block has sorted or masked, not tokens with expert numbers"
_LINEARS = "each of its experts is a module of its own, in a dictionary or list with another forward"
UNSUPPORTED_FAMILIES = {
    **dict.fromkeys(("llama4", "llama4_text"), "every expert computes every token, there is nothing to dispatch"),
    **dict.fromkeys(("jetmoe", "vitpose", "vitpose_backbone"), _NO_DISPATCH),
    **dict.fromkeys(("nllb-moe", "switch_transformers"), _LINEARS),
    "longcat_flash": "its gate_up_proj has rows for experts that compute nothing, its down_proj has none for them",
    "dbrx": "its experts' weights are one matrix without a dimension of experts",
    "doge": "its experts are rows of two embeddings",
}


def is_experts_module(module):
    """Whether ``module`` computes experts by Transformers' contract: ``forward(tokens, top_k_index, top_k_weights)``.

    An undecorated class with the contract counts as well (step3p7). A shape alone does not: Llama-4's experts take
    rows that are sorted already, and shared experts and codebooks have three dimensions too.
    """
    own = vars(module)
    if type(own.get("num_experts")) is not int:
        return False
    return all(flag in own for flag in _FLAGS) or _follows_contract(module)


def _follows_contract(module):
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    weights = {name: _shape(param) for name, param in module.named_parameters(recurse=False)}
    return (arguments == ["hidden_states", "top_k_index", "top_k_weights"]
            and set(weights) == {"gate_up_proj", "down_proj"}
            and all(len(shape) == 3 and shape[0] == module.num_experts for shape in weights.values()))  # yapf: disable


def expert_parameters(module, name):
    """The parameters of an experts module that have one slice per expert, in dimension 0.

    Args:
        module: an experts module, see ``is_experts_module``.
        name: what the module is called in errors.

    Returns:
        dict: parameter name -> parameter; weights ``[E, ., .]``, biases ``[E, .]``.

    Raises:
        ValueError: the flags promise a tensor that is missing or has another shape, or the module has per-expert
            tensors that the flags do not know, such as the scales of quantized weights.
    """
    up = up_name(module)
    dims = {up: 3, "down_proj": 3}
    if getattr(module, "has_bias", False):
        dims.update({f"{up}_bias": 2, "down_proj_bias": 2})
    found = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for key, expected in dims.items():
        shape = _shape(found[key]) if key in found else None
        if shape is None or len(shape) != expected or shape[0] != module.num_experts:
            raise ValueError(f"expert_parallel: found {name}.{key} {'missing' if shape is None else tuple(shape)}; "
                             f"allowed: {expected} dimensions, the first of num_experts={module.num_experts}")
        if not found[key].is_floating_point() or found[key].element_size() < 2:
            raise ValueError(
                f"expert_parallel: found {name}.{key} of {found[key].dtype}; allowed: weights that can be "
                "trained (float32, bfloat16, float16), not quantized ones")
    for key in set(found) - set(dims):
        if _shape(found[key])[:1] == (module.num_experts, ):
            raise ValueError(
                f"expert_parallel: found {name}.{key} {tuple(_shape(found[key]))}, a tensor per expert that "
                f"the experts interface does not know; allowed: {', '.join(dims)} (scales of quantized "
                "experts cannot be split)")
    return {key: getattr(module, key) for key in dims}


def up_name(module):
    """The name of the parameter of an experts module that its tokens are multiplied with first."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def check_experts_module(module, name):
    """Raise ValueError when somebody else has changed how an experts module is called or split."""
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"expert_parallel: found {name} with Transformers' own expert parallelism on; allowed: one of "
            "the two. Load the model without a distributed_config or tp_plan that splits the experts.")
    if name.endswith(".base_layer"):
        raise ValueError(
            f"expert_parallel: found {name}, experts with an adapter on their tensors; allowed: adapters on "
            "other modules (target_modules), or training the experts themselves (modules_to_save)")
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        raise ValueError(f"expert_parallel: found {name} with a forward that was replaced on the instance, as "
                         "Accelerate's device_map does; allowed: the class's own forward. Load the model without "
                         "device_map.")


def refuse_unsupported_family(model):
    """Raise ValueError for a model of a MoE family that does not use the experts interface, and say why."""
    configs = (getattr(module, "config", None) for module in model.modules())
    for model_type in dict.fromkeys(getattr(config, "model_type", None) for config in configs):
        if model_type in UNSUPPORTED_FAMILIES:
            raise ValueError(f"expert_parallel.enabled: found a model of type {model_type!r}, whose experts cannot be "
                             f"spread: {UNSUPPORTED_FAMILIES[model_type]}; allowed: a family on the experts interface "
                             "of Transformers. For a plain ZeRO run set enabled to false.")


def router_parameters(model, experts_name):
    """The parameters of the modules that choose experts for the experts module called ``experts_name``.

    Those are the neighbours of the experts called ``gate`` or ``router``, and any with one row per expert.
    """
    experts = model.get_submodule(experts_name)
    parent = model.get_submodule(experts_name.rpartition(".")[0])
    found = {}
    for name, child in parent.named_children():
        if any(map(is_experts_module, child.modules())):
            continue
        params = dict(child.named_parameters())
        if name in ("gate", "router") or any(_shape(p)[:1] == (experts.num_experts, ) for p in params.values()):
            found.update({id(param): param for param in params.values()})
    return list(found.values())


def _shape(tensor):
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))
