# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A trained model as a plain Hugging Face checkpoint: the files that ``save_pretrained`` writes, by all ranks.

A file is one more placement of the model's tensors: its writer holds it whole, all others hold nothing. So each rank
receives what belongs into its file from the ranks that have it, through one bucket, and writes it. In each round every
writer has one file; no rank ever holds more of the model than that.
"""
import contextlib
import os
from typing import NamedTuple

from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

import deepspeed.comm as dist
from deepspeed.checkpoint.hf_files import plan_files, save_config
from deepspeed.checkpoint.hf_layout import saved_contents
from deepspeed.checkpoint.model_tensors import model_tensors
from deepspeed.checkpoint.staging import staged
from deepspeed.comm.agreement import agree, failing_together
from deepspeed.moe.reshard_exchange import bucket_bytes_of


class _File(NamedTuple):
    name: str
    owner: int
    tensors: dict  # name -> hf_layout.Converted


def save_hf_checkpoint(engine, save_dir, max_shard_size="50GB", tokenizer=None):
    """Write the model as ``save_pretrained`` of the unmodified model would; every rank must call.

    Peak memory above training: on each rank one file, on the CPU, and ``expert_parallel.reshard_bucket_bytes``.

    Args:
        engine: a ``DeepSpeedEngine``, under any ZeRO stage.
        save_dir: folder that all ranks see; if some do not, those that do write all of it. Made when missing; a
            checkpoint in it stays loadable until the new one is complete.
        max_shard_size: bytes, or a string such as ``"5GB"``, after which a new file begins.
        tokenizer: a tokenizer or processor to save as well. Without one, the files of the folder or cached Hub
            repository that the model was loaded from are copied.

    Raises:
        ValueError: the engine's model is not a ``PreTrainedModel``, or has adapters in it.
        FailedOnRank: on every rank, when one of them could not do its part; ``save_dir`` is then as before.
    """
    model, group = engine.module, dist.get_world_group()
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    if not isinstance(model, PreTrainedModel) or has_adapters:
        raise ValueError(
            f"save_hf_checkpoint: found {type(model).__name__}{' with adapters' if has_adapters else ''}; "
            "allowed: a model of Transformers (for adapters, merge them first or use Trainer.save_model)")
    with _released(engine), staged(os.fspath(save_dir), group) as staging:
        with failing_together(group):
            held = model_tensors(model, group)
        with failing_together(group):
            plan = plan_files(model, held.tensors, held.buffers, max_shard_size)
        seeing = agree(group, numbers=(os.path.isdir(staging), 0))
        writers = [rank for rank, (sees, _) in enumerate(seeing) if sees]
        shards = [_File(name, writers[number % len(writers)], tensors)
                  for number, (name, tensors) in enumerate(plan.files.items())]  # yapf: disable
        with failing_together(group):
            if dist.get_rank(group=group) == 0:
                save_config(model, tokenizer, staging)
        _write(model, held, shards, plan.nbytes, len(writers), staging, group,
               bucket_bytes_of(engine._config._param_dict))
        with failing_together(group):
            if dist.get_rank(group=group) == 0:
                plan.write_index(staging)


@contextlib.contextmanager
def _released(engine):
    """Let every parameter be in its shards only, as for any checkpoint of the engine."""
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()


def _write(model, held, shards, total, writers, staging, group, bucket_bytes):
    rank = dist.get_rank(group=group)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Saving the model", disable=rank != 0) as bar:
        for start in range(0, len(shards), writers):
            in_round = shards[start:start + writers]
            wanted = {}
            with failing_together(group):
                for shard in in_round:
                    wanted.update(_wanted(held, shard))
            gathered = held.gather(wanted, group, bucket_bytes)
            with failing_together(group):
                for shard in [shard for shard in in_round if shard.owner == rank]:
                    _write_file(model, shard, gathered, os.path.join(staging, shard.name))
            del gathered
            bar.update(sum(tensor.nbytes for shard in in_round for tensor in shard.tensors.values()))


def _input(name):
    """What a whole tensor is called while a conversion is to be computed from it."""
    return f"input {name}"


def _wanted(held, shard):
    """What the writer of a file needs: its tensors, or what they are computed from."""
    wanted = {}
    for name, tensor in shard.tensors.items():
        moved = tensor.sections and held.made_of(name, tensor.shape, tensor.dtype, tensor.sections, shard.owner)
        if moved:
            wanted[name] = moved
        else:
            wanted.update({_input(part): held.whole(part, shard.owner, _input(part)) for part in tensor.inputs})
    return wanted


def _write_file(model, shard, gathered, path):
    for name, tensor in shard.tensors.items():
        if name not in gathered:
            gathered.update(saved_contents(model, {part: gathered[_input(part)] for part in tensor.inputs}))
    save_file({name: gathered[name] for name in shard.tensors}, path, metadata={"format": "pt"})


def consolidated_state_dict(engine, exclude_frozen_parameters=False):
    """The whole model under the names of the unmodified one; every rank must call.

    Returns:
        dict: name -> tensor on the CPU, on rank 0; None on the others. Tied names share a tensor.
    """
    group = dist.get_world_group()
    with _released(engine):
        with failing_together(group):
            held = model_tensors(engine.module, group)
        names = [name for name in held.tensors if not (exclude_frozen_parameters and name in held.frozen)]
        first = {}  # of tied names
        for name in names:
            first.setdefault(id(held.tensors[name]), name)
        whole, bucket_bytes = {}, bucket_bytes_of(engine._config._param_dict)
        for batch in _batches(held.tensors, first.values(), bucket_bytes):
            whole.update(held.gather({name: held.whole(name, 0) for name in batch}, group, bucket_bytes))
    if dist.get_rank(group=group) != 0:
        return None
    return {name: whole[first[id(held.tensors[name])]] for name in names}


def _batches(tensors, names, nbytes):
    """Lists of names of at most ``nbytes`` together, or of one tensor."""
    batch, size = [], 0
    for name in names:
        if batch and size + tensors[name].nbytes > nbytes:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += tensors[name].nbytes
    if batch:
        yield batch
