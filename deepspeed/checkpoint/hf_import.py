# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A Hugging Face checkpoint into a model partitioned by ZeRO-3: each rank reads what it holds, nothing else.

Files are one more placement of the model's tensors. They are mapped into memory, so that only what is copied from them
is read, and every rank copies the boxes of elements that lie in its own shards::

    files    model-00001: experts.0.gate_proj | experts.0.up_proj | experts.1.gate_proj | ...   model-00002: ...
                                 \\____________________________________/
    rank 1                 its interval of gate_up_proj [E, 2F, H], read from where it lies

No rank holds a whole layer, and no weights are sent. Whether the files fit the model is known from their headers
before anything is written.
"""
import contextlib
import dataclasses
import os
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.logging import tqdm

import deepspeed.comm as dist
from deepspeed.checkpoint.differences import first_of, told
from deepspeed.checkpoint.hf_layout import file_tensors, loaded_contents, loaded_tensors
from deepspeed.comm.agreement import failing_together
from deepspeed.moe.experts_interface import is_experts_module
from deepspeed.moe.reshard import Move, boxes_of, zero3_placement
from deepspeed.moe.reshard_exchange import bucket_bytes_of
from deepspeed.runtime.zero.utils import is_zero_param

_EXTENSION = ".safetensors"
_NAMED = 5  # tensors that an error names of each kind
# By their names in a file's header.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
           "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # yapf: disable


class _InFile(NamedTuple):
    """A tensor in a file that is mapped into memory."""
    path: str
    file: safe_open
    shape: torch.Size
    dtype: torch.dtype


def can_read_shards(model, files, load_config):
    """Whether ``read_shards`` can load ``files`` into ``model``; otherwise Transformers does, through rank 0.

    It cannot where shards are not in memory as they are (NVMe, quantized, hpZ), for quantized checkpoints, without
    mapped memory, and for pickle files, which the caller must have asked for.

    Args:
        files: paths of all files of the checkpoint.
        load_config: Transformers' ``LoadStateDictConfig``.

    Raises:
        ValueError: for pickle files that were not asked for by ``use_safetensors=False``.
    """
    if not all(file.endswith(_EXTENSION) for file in files):
        if load_config.use_safetensors is not False:
            raise ValueError(f"from_pretrained: found {files[0]}, a pickle file, which can run any code and is read "
                             "whole by rank 0; allowed: safetensors files, or use_safetensors=False to ask for pickle")
        return False
    partitioned = [param for param in model.parameters() if is_zero_param(param)]
    return bool(partitioned and not load_config.is_quantized and not load_config.disable_mmap
                and all(map(_is_plain_shard, partitioned)))  # yapf: disable


def _is_plain_shard(param):
    return (param.nvme_swapper is None and param.ds_secondary_tensor is None
            and not hasattr(param.ds_tensor, "ds_quant_scale"))  # yapf: disable


def read_shards(model, files, load_config):
    """Read this rank's shards of ``model`` from a checkpoint; every rank must call.

    Memory above the model's shards: a bucket (``expert_parallel.reshard_bucket_bytes``) where shards are on a device.
    The tensors of a conversion that is more than their elements in another order are whole on each rank in turn.

    Args:
        model: a ``PreTrainedModel`` constructed inside ``zero.Init``; parameters and buffers are written.
        files, load_config: as for ``can_read_shards``.

    Returns:
        LoadStateDictInfo: what is left to Transformers to initialize and to report: a head that the files lack,
        tensors of a part that the model lacks.

    Raises:
        ValueError: on every rank and before anything is written, for files that are broken or of another model; it
            names files and tensors.
    """
    from transformers.integrations import deepspeed_config

    group = dist.get_world_group()
    conversions = load_config.weight_mapping or []
    with contextlib.ExitStack() as opened:
        with failing_together(group):
            targets = _targets(model)
            stored = _open(files, load_config.sharded_metadata, opened)
            whole = {name: _meta(getattr(tensor, "ds_shape", tensor.shape), tensor.dtype)
                     for name, tensor in targets.items()}  # yapf: disable
            metas = {name: _meta(tensor.shape, tensor.dtype) for name, tensor in stored.items()}
            with _refusing(model, whole, metas, load_config) as faults:
                found = loaded_tensors(model, whole, metas, conversions)
                info = _compared(whole, found, stored)
                faults.update(_faults(model, info, found, targets, load_config))
        for name, *_ in info.mismatched_keys:
            del found[name]
        with failing_together(group):
            _Reader(model, stored, whole, conversions, bucket_bytes_of(deepspeed_config())).read(found, targets)
    if conversions:
        model._weight_conversions = conversions  # what saving reverts
    return info


def _meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def _targets(model):
    """Name in the state dict -> parameter or buffer."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _open(files, metadata, opened):
    """Name -> ``_InFile`` of every tensor in ``files``, from their headers: no tensor is looked at.

    Args:
        metadata: Transformers' description of the index, or None when there is one file.
        opened: ``ExitStack`` that closes the files.
    """
    index = (metadata or {}).get("weight_map", {})
    for name, file in index.items():
        if os.path.isabs(file) or ".." in file.replace(os.sep, "/").split("/"):
            raise ValueError(f"index of the checkpoint: found {name} in {file}; allowed: files below its folder")
    stored = {}
    for path in files:
        with _naming(path):
            file = opened.enter_context(safe_open(path, framework="pt"))
            names = list(file.keys())
        for name in names:
            if name in stored:
                raise ValueError(f"{path}: found tensor {name}, which is in {stored[name].path} too; allowed: once")
            with _naming(path, name):
                part = file.get_slice(name)
                stored[name] = _InFile(path, file, torch.Size(part.get_shape()), _DTYPES[part.get_dtype()])
    lost = [f"{name} in {file}" for name, file in index.items()
            if name not in stored or not stored[name].path.endswith(os.path.basename(file))]  # yapf: disable
    if lost:
        raise ValueError(
            f"index of the checkpoint: found {len(lost)} tensors that are not in the files that it names: "
            f"{first_of(lost, _NAMED)}; allowed: the files that hold them")
    return stored


@contextlib.contextmanager
def _naming(path, tensor=None):
    """Let an error inside the block name the file and the tensor."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{path}: found no such file, though the checkpoint's index names it; allowed: a checkpoint "
                         "with all its files") from error
    except Exception as error:  # the library has an error class of its own, torch has others
        what = f"tensor {tensor}" if tensor else "a file"
        raise ValueError(f"{path}: found {what} that cannot be read ({type(error).__name__}: {error}); allowed: a "
                         f"whole safetensors file, with tensors of {', '.join(_DTYPES)}") from error


def _compared(whole, found, stored):
    """``LoadStateDictInfo``: how what the files hold differs from the model."""
    used = {name for tensor in found.values() for name in tensor.inputs}
    mismatched = {(name, tuple(tensor.shape), tuple(whole[name].shape))
                  for name, tensor in found.items() if tensor.shape != whole[name].shape}  # yapf: disable
    return LoadStateDictInfo(missing_keys=whole.keys() - found.keys(),
                             unexpected_keys=stored.keys() - used,
                             mismatched_keys=mismatched,
                             error_msgs=[],
                             conversion_errors={},
                             skipped_pp_keys=set())


def _faults(model, info, found, targets, load_config):
    """What is wrong -> names: with experts, a body's tensors have to be there, all of them and no others."""
    strict = dataclasses.replace(info, missing_keys=set(info.missing_keys), unexpected_keys=set(info.unexpected_keys))
    model._adjust_missing_and_unexpected_keys(strict)  # what the family says is no fault
    loaded = {id(targets[name]) for name in found}
    tied = model.all_tied_weights_keys  # to what they are tied; from either the other gets its value
    excused = {*tied, *(source for name, source in tied.items() if name in found)}
    body = f"{model.base_model_prefix}." if model.base_model is not model else ""
    missing = [name for name in strict.missing_keys - excused
               if name.startswith(body) and id(targets[name]) not in loaded]  # yapf: disable
    parts = {name.partition(".")[0] for tensor in found.values() for name in tensor.inputs}
    unexpected = [name for name in strict.unexpected_keys if name.partition(".")[0] in parts]
    misshapen = [f"{name} {there} for {here}" for name, there, here in sorted(info.mismatched_keys)]
    has_experts = any(map(is_experts_module, model.modules()))  # a job may load other models beside
    return {
        "missing": sorted(missing) if has_experts else [],
        "unexpected": sorted(unexpected) if has_experts else [],
        "of another shape": [] if load_config.ignore_mismatched_sizes else misshapen,
        "of another kind": [f"{name} {tensor.dtype} for {targets[name].dtype}" for name, tensor in found.items()
                            if tensor.dtype.is_floating_point != targets[name].dtype.is_floating_point],
    }  # yapf: disable


@contextlib.contextmanager
def _refusing(model, whole, stored, load_config):
    """Yield a dict for what is wrong -> names; raise ValueError with it, or with an error of the conversions.

    Args:
        stored: name in the files -> meta tensor.
    """
    faults, cause = {}, None
    try:
        yield faults
    except Exception as error:
        faults["not convertible"], cause = [str(error)], error
    if any(faults.values()):
        named = {name for names in faults.values() for name in names}
        for fault, names in _faults_of_files(file_tensors(model, whole), stored).items():
            faults[fault] = [name for name in names if name not in named]
        raise ValueError(
            f"{load_config.pretrained_model_name_or_path}: found a checkpoint that does not fit "
            f"{type(model).__name__}: {told(faults, _NAMED)}; allowed: every tensor of the "
            "model but a head's, and no others beside them; other shapes with ignore_mismatched_sizes=True; "
            "anything that Transformers takes, read whole by rank 0, with DS_AUTOEP_OFF=hf-import") from cause


def _faults_of_files(expected, stored):
    """The same by the names that ``save_pretrained`` gives, unless the files have other names altogether."""
    missing = sorted(expected.keys() - stored.keys())
    misshapen = [f"{name} {tuple(stored[name].shape)} for {tuple(tensor.shape)}" for name, tensor in expected.items()
                 if name in stored and stored[name].shape != tensor.shape]  # yapf: disable
    return {
        "missing in the files": missing if len(missing) < len(expected) / 2 else [],
        "of another shape in the files": misshapen
    }


class _Reader:
    """Copies this rank's intervals of the model's tensors from mapped files.

    Args:
        stored: name in the files -> ``_InFile``.
        whole: name in the state dict -> meta tensor.
        bucket_bytes: how much is copied at a time.
    """

    def __init__(self, model, stored, whole, conversions, bucket_bytes):
        self.model, self.stored, self.whole, self.conversions = model, stored, whole, conversions
        self.bucket_bytes = bucket_bytes

    @torch.no_grad()
    def read(self, found, targets):
        """Fill ``targets`` from what ``found`` (name -> ``Converted``) says that they are made of."""
        computed = {}
        for name in tqdm(found, desc="Loading shards of weights", disable=dist.get_rank() != 0):
            shard, start, stop = _interval(targets[name])
            if found[name].sections is None and name not in computed:
                computed = self._compute(found[name].inputs)
            if found[name].sections is None:
                shard[:stop - start].copy_(computed.pop(name).reshape(-1)[start:stop])
            for section in found[name].sections or ():
                self._copy(section, shard, start, stop)
            targets[name]._is_hf_initialized = True

    def _compute(self, inputs):
        tensors = {name: self._mapped(name) for name in inputs}
        return loaded_contents(self.model, self.whole, tensors, self.conversions)

    def _copy(self, section, shard, start, stop):
        target = section.target
        boxes = boxes_of(section.shape, target.strides, start - target.offset, stop - target.offset)
        if not boxes:
            return  # before the tensor is mapped, which reads its first pages
        source = self._mapped(section.source.tensor)
        size = max(1, self.bucket_bytes // source.element_size())
        for move in [Move(section, box, 0, start) for box in boxes]:
            for first in range(0, move.numel, size):
                for part in move.part(first, first + size):
                    part.target_view(shard).copy_(part.source_view(source))

    def _mapped(self, name):
        with _naming(self.stored[name].path, name):
            return self.stored[name].file.get_tensor(name)


def _interval(tensor):
    """The flat memory that this rank has for ``tensor``, and which interval ``[start, stop)`` of it that is."""
    if not is_zero_param(tensor):
        return tensor.view(-1), 0, tensor.numel()
    group = tensor.ds_process_group
    placement = zero3_placement(tensor.ds_numel, dist.get_world_size(group=group))
    return tensor.ds_tensor.view(-1), *placement.interval(dist.get_rank(group=group))
