# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which elements of a model's tensors those in a Hugging Face checkpoint are, and the other way round.

On disk many families keep other tensors than in memory: a matrix per expert, other names, halves apart. Transformers
knows how to turn one into the other, on saving and on loading. We let it convert tensors on the meta device, which
have no contents, and follow what each result is made of (``tensor_origins``). So every family's conversion is known
without a line about any of them.
"""
import copy
from typing import NamedTuple, Optional, Tuple

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import deepspeed as zero3_loading

from deepspeed.checkpoint.tensor_origins import Origins, memory_of
from deepspeed.moe.expert_layout import Section


class Converted(NamedTuple):
    """A tensor that a conversion makes: of a checkpoint file from the model's tensors, or of a model from the files'.

    Attributes:
        sections: from the given tensors to this one; or None when it is more than their elements in another order, and
            the conversion itself must compute it from ``inputs``.
        inputs: names of the given tensors that it is made of.
        memory: tensors for which this is equal share a file, as ``save_pretrained`` lets what shares memory.
    """
    shape: torch.Size
    dtype: torch.dtype
    sections: Optional[Tuple[Section, ...]]
    inputs: Tuple[str, ...]
    memory: int

    @property
    def nbytes(self):
        return self.shape.numel() * self.dtype.itemsize


def file_tensors(model, tensors):
    """What ``save_pretrained`` would write for ``model``, in its order.

    Args:
        model: a ``PreTrainedModel``; its config and the conversions that it was loaded with are used.
        tensors: name in the state dict -> tensor on the meta device. Each has memory of its own.

    Returns:
        dict: name in the files -> ``Converted``.
    """
    return _followed(tensors, lambda: revert_weight_conversion(_seen_whole(model, tensors), dict(tensors)))


def loaded_tensors(model, whole, tensors, conversions):
    """What ``from_pretrained`` would load into ``model`` from files; tensors that it would not use are left out.

    Args:
        model: a ``PreTrainedModel``, maybe partitioned.
        whole: name in the state dict -> tensor on the meta device, as if the model were whole.
        tensors: name in the files -> tensor on the meta device. Each has memory of its own.
        conversions: Transformers' ``WeightRenaming`` and ``WeightConverter`` objects for the model.

    Returns:
        dict: name in the model's state dict -> ``Converted``.
    """
    found = _followed(tensors, lambda: loaded_contents(model, whole, tensors, conversions))
    used = {name for tensor in found.values() for name in tensor.inputs}
    # A name that is right as it stands, but is taken for another family's when names are translated.
    kept = {name: tensor for name, tensor in tensors.items() if name in whole and name not in used | found.keys()}
    return {**found, **_followed(kept, lambda: kept)}


def _seen_whole(model, tensors):
    """``model``, to be asked for the shapes and dtypes of parameters as if they were whole."""
    seen = copy.copy(model)
    seen.get_parameter = lambda name: tensors[name]
    return seen


def _followed(tensors, convert):
    origins = Origins(tensors)
    with origins:
        converted = convert()
    return {name: _described(tensor, origins.of(tensor)) for name, tensor in converted.items()}


def _described(tensor, origin):
    sections = origin.sections and tuple(section.collapsed() for section in origin.sections)
    return Converted(tensor.shape, tensor.dtype, sections, origin.inputs, memory_of(tensor))


def saved_contents(model, tensors):
    """The files' tensors made of ``tensors`` (state-dict name -> whole tensor), by name; contiguous."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def loaded_contents(model, whole, tensors, conversions):
    """The model's tensors made of ``tensors`` (name in the files -> tensor), by name in its state dict.

    Args:
        model, whole, conversions: as for ``loaded_tensors``.
    """
    converted = zero3_loading._apply_weight_conversions_to_state_dict(_seen_whole(model, whole), dict(tensors),
                                                                      conversions)
    if isinstance(converted, dict):  # of older releases of Transformers; later ones yield one group after the other
        return converted
    return {name: tensor for group in converted for name, tensor in group.items()}
