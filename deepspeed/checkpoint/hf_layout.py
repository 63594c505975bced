# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which element of which of the model's tensors each element of a tensor in a Hugging Face checkpoint is.

On disk many families keep other tensors than in memory: a matrix per expert, other names, halves apart. Transformers
knows how to turn one into the other (``revert_weight_conversion``). We let it convert tensors on the meta device,
which have shapes, strides and offsets but no contents, and read from the strides of each result which elements of
which tensor it is. So every family's conversion is known without a line about any of them.
"""
from typing import NamedTuple, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.core_model_loading import revert_weight_conversion

from deepspeed.moe.expert_layout import Side


class FileTensor(NamedTuple):
    """A tensor of a checkpoint file.

    Attributes:
        view: where its elements lie in one of the model's tensors, one stride per axis of ``shape``; or None when it
            is more than a view, and the conversion itself must compute it from ``inputs``.
        inputs: names of the model's tensors that it is made of.
        storage: tensors for which this is equal share a file, as ``save_pretrained`` lets what shares memory.
    """
    shape: torch.Size
    dtype: torch.dtype
    view: Optional[Side]
    inputs: Tuple[str, ...]
    storage: int

    @property
    def nbytes(self):
        return self.shape.numel() * self.dtype.itemsize


class _Origins(TorchFunctionMode):
    """Keeps track of what the results of operations on meta tensors are made of.

    ``contiguous`` and ``clone`` return another alias of the same elements, so that a result stays a view whose strides
    tell its elements apart, while the memory that the copy would have is counted as new.
    """

    def __init__(self, tensors):
        super().__init__()
        self._inputs = {_storage(tensor): (name, ) for name, tensor in tensors.items()}
        self._memory = {}  # id of a tensor -> (number of the memory that it would have, the tensor, kept alive)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.clone or func is torch.Tensor.contiguous and not args[0].is_contiguous():
            return self._seen(args[0].as_strided(args[0].shape, args[0].stride(), args[0].storage_offset()))
        if func is torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for made in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and given]:
            if _storage(made) not in self._inputs:
                names = [name for tensor in given for name in self.inputs_of(tensor)]
                self._inputs[_storage(made)] = tuple(dict.fromkeys(names))
            elif made is not given[0]:
                self._seen(made, self.memory_of(given[0]))
        return result

    def _seen(self, tensor, memory=None):
        self._memory[id(tensor)] = (len(self._memory) if memory is None else memory, tensor)
        return tensor

    def inputs_of(self, tensor):
        return self._inputs.get(_storage(tensor), ())

    def memory_of(self, tensor):
        return self._memory[id(tensor)][0] if id(tensor) in self._memory else -_storage(tensor)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def file_tensors(model, tensors):
    """What ``save_pretrained`` would write for ``model``, in its order.

    Args:
        model: a ``PreTrainedModel``; its config and the conversions that it was loaded with are used.
        tensors: name in the state dict -> tensor on the meta device. Each has memory of its own.

    Returns:
        dict: name in the files -> ``FileTensor``.
    """
    origins = _Origins(tensors)
    with origins:
        converted = revert_weight_conversion(model, dict(tensors))
    names = {_storage(tensor): name for name, tensor in tensors.items()}
    return {name: _described(tensor, origins, names) for name, tensor in converted.items()}


def _described(tensor, origins, names):
    source = names.get(_storage(tensor))
    view = None if source is None else Side(source, tensor.storage_offset(), tensor.stride())
    return FileTensor(tensor.shape, tensor.dtype, view, origins.inputs_of(tensor), origins.memory_of(tensor))


def converted_tensors(model, tensors):
    """The file's tensors made of ``tensors`` (state-dict name -> whole tensor), by name; contiguous."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}
