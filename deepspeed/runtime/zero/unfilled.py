# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Expert tensors that are never whole: shape first, contents when each rank has its shard.

Inside ``zero.Init`` the constructor of an experts module calls ``torch.empty(E, ...)`` for each of its tensors; all
of them used to exist whole on every rank until the constructor was done. Such a call now returns a tensor of one
element that is seen as ``E x ...``. When the parameter is partitioned only the shard is allocated; what initializers
do to it element by element (``normal_``, ``uniform_``, ``fill_``, ...) is done to the shards, each rank with random
numbers of its own. Whatever else is asked of such a tensor before it is partitioned makes it whole first, as before.
"""
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

# Random and constant initializers of torch.nn.init, and the elementwise in-place operations that they are made of. By
# name: Transformers puts its own functions, which respect what was loaded, in the place of torch.nn.init's.
_RANDOM = frozenset(["normal_", "uniform_", "_no_grad_trunc_normal_", "exponential_", "log_normal_"])
_ELEMENTWISE = _RANDOM | frozenset(
    ["constant_", "zeros_", "ones_", "zero_", "fill_", "erfinv_", "mul_", "add_", "sub_", "div_", "clamp_"])
# What makes another view of the same tensor.
_ALIASES = (torch.Tensor.detach, torch.Tensor.data.__get__)
# By what an alias finds the shard of its parameter.
_OF_A_SHARD = ("ds_tensor", "ds_process_group")
# What needs no contents, besides attributes.
_WITHOUT_CONTENTS = (torch.Tensor.requires_grad_, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
                     torch.Tensor.nelement, torch.Tensor.stride, torch.Tensor.is_floating_point,
                     torch.Tensor.is_complex, torch.Tensor.untyped_storage)


class _History:
    """What was done to a tensor that has no contents yet, and all its aliases, such as ``param.data``."""

    def __init__(self):
        self.done = []  # of (function, args, kwargs)
        self.aliases = []  # weak references


class Unfilled(torch.Tensor):
    """A tensor of one element that is seen with a larger shape, until it gets contents or ``zero.Init`` ends."""

    _alive = []  # weak references to all tensors of the class

    @classmethod
    def of(cls, tensor, history, **attributes):
        """``tensor`` as one of this class, an alias of the others with that history."""
        unfilled = tensor.as_subclass(cls)
        unfilled.__dict__.update(attributes, _history=history)
        history.aliases.append(weakref.ref(unfilled))
        cls._alive.append(weakref.ref(unfilled))
        return unfilled

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _ELEMENTWISE:
                self, *values = args or (kwargs.pop("tensor"), )  # torch.nn.init hands it over by name
                if isinstance(self, Unfilled) and not _has_tensors(values, kwargs):
                    return self._do(func, values, kwargs)
                args = (self, *values)
            if func in _ALIASES:
                attributes = {name: getattr(args[0], name) for name in _OF_A_SHARD if hasattr(args[0], name)}
                return cls.of(func(*args, **kwargs), args[0]._history, **attributes)
            if func.__name__ == "__set__":  # `tensor.data = other` takes the other's contents
                for tensor in filter(is_unfilled, args[1:]):
                    tensor._fill_whole()
            elif func not in _WITHOUT_CONTENTS and func.__name__ != "__get__":
                for tensor in filter(is_unfilled, tree_leaves((args, kwargs))):
                    tensor._fill_whole()
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and func.__name__ == "__get__" and is_unfilled(args[0]):
                args[0]._fill_whole()  # a view, such as `.T`
                return func(*args, **kwargs)
            return result

    def _is_released(self):
        return self.numel() == 0 and getattr(self, "ds_tensor", None) is not None

    def _do(self, func, args, kwargs):
        if self._is_released():
            _do_to_shard(self, func, args, kwargs)
        elif is_unfilled(self):
            self._history.done.append((func, args, kwargs))
        else:
            func(self, *args, **kwargs)
        return self

    def _fill_whole(self):
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for func, args, kwargs in self._history.done:
            func(whole, *args, **kwargs)
        for alias in filter(is_unfilled, [reference() for reference in self._history.aliases]):
            alias.data = whole


def _has_tensors(args, kwargs):
    return any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))


def is_unfilled(value):
    """Whether ``value`` is a tensor that has a shape but no contents yet."""
    if not isinstance(value, Unfilled):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.numel() > 1 and value.untyped_storage().nbytes() == value.element_size()


def _do_to_shard(param, func, args, kwargs):
    """Do to this rank's shard what was asked of the whole parameter."""
    if func.__name__ in _RANDOM:
        generator = torch.Generator(device=param.ds_tensor.device)
        # Drawn from the caller's generator, so that a seed still decides all. Ranks may share it, so the rank is mixed
        # in, by the golden ratio of 32 bits, which is what a CPU generator takes of a seed.
        drawn = kwargs.get("generator") or torch.default_generator
        seed = int(torch.randint(2**32, (1, ), generator=drawn, device=drawn.device))
        seed = (seed + dist.get_rank(group=param.ds_process_group) * 0x9E3779B1) % 2**32
        kwargs = {**kwargs, "generator": generator.manual_seed(seed)}
    with torch.no_grad():
        func(param.ds_tensor, *args, **kwargs)


_trunc_normal = torch.nn.init._no_grad_trunc_normal_


def start_leaving_unfilled():
    """Let ``torch.empty`` leave experts unfilled, until ``stop_leaving_unfilled``."""
    torch.empty = _empty_for_experts(torch.empty)
    torch.nn.init._no_grad_trunc_normal_ = _trunc_normal_of_experts


def stop_leaving_unfilled():
    """Make what was left unfilled ordinary: partitioned, or whole. ``torch.empty`` is left as it is."""
    torch.nn.init._no_grad_trunc_normal_ = _trunc_normal
    alive, Unfilled._alive = [reference() for reference in Unfilled._alive], []
    for param in [param for param in alive if param is not None]:
        if is_unfilled(param) and sys.exc_info()[0] is None:  # an error on its way out is not to become another
            param._fill_whole()
        param.__class__ = torch.nn.Parameter if getattr(param, "_is_param", False) else torch.Tensor


def _trunc_normal_of_experts(tensor, *args, **kwargs):
    # It draws again what lies outside, element by element, but reads and copies tensors to do so.
    if isinstance(tensor, Unfilled):
        return tensor._do(_trunc_normal, args, kwargs)
    return _trunc_normal(tensor, *args, **kwargs)


def _empty_for_experts(empty):
    """Wrap ``torch.empty``: unfilled where an experts module asks for a tensor with a matrix for each expert."""

    def wrapped(*size, **kwargs):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if len(shape) != 3 or kwargs.get("out") is not None or not _is_of_experts(sys._getframe(1), shape[0]):
            return empty(*size, **kwargs)
        one = empty(1, **kwargs)
        return Unfilled.of(one.expand(*shape), _History()) if one.is_floating_point() else empty(*size, **kwargs)

    return wrapped


def _is_of_experts(frame, experts):
    """Whether ``frame`` is a method, such as the constructor, of a module of that many experts.

    Of Transformers' experts interface only, whose decorator gives a class ``_apply_gate``: their constructors do no
    more than make the tensors, on all ranks alike. Others may do anything, on one rank too.
    """
    module = frame.f_locals.get("self")
    return (isinstance(module, torch.nn.Module) and hasattr(type(module), "_apply_gate")
            and module.__dict__.get("num_experts") == experts)  # yapf: disable


def allocates_shards(init):
    """Whether a shard of ``init`` stays in memory as it is allocated: not on NVMe, quantized or held twice (hpZ)."""
    return not (init.remote_device == OffloadDeviceEnum.nvme or init.zero_param_process_group is not None
                or init.quantized_nontrainable_weights)  # yapf: disable


def partition_unfilled(init, param):
    """Partition ``param``, one element seen with the parameter's shape, by ``init``: only the shard is allocated."""
    init._convert_to_deepspeed_param(param)
    with torch._C.DisableTorchFunctionSubclass(), _WithoutContents():
        param.partition()
    param.ds_tensor.zero_()  # rather than what the memory held, in the padding too
    for func, args, kwargs in param._history.done if isinstance(param, Unfilled) else ():
        _do_to_shard(param, func, args, kwargs)


class _WithoutContents(TorchDispatchMode):
    """Lets a parameter of one repeated element be partitioned: its whole tensor is neither made nor copied from."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
