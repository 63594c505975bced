# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A plain Hugging Face checkpoint from the folder of a ZeRO-3 checkpoint, in one process without an accelerator.

A file is written from the elements that it holds, wherever the ranks that saved had them, and only then the next one
is begun. The model is there on the meta device alone: its class and its configuration say what is in which file.
"""
import os

import torch
import transformers
from safetensors.torch import save_file
from tqdm import tqdm

from deepspeed.checkpoint.hf_files import plan_files, save_config
from deepspeed.checkpoint.hf_layout import saved_contents
from deepspeed.checkpoint.safe_save import check_finished, saved_tag
from deepspeed.checkpoint.staging import staged
from deepspeed.checkpoint.zero3_shards import SavedShards
from deepspeed.moe.expert_layout import row_major

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_checkpoint(checkpoint_dir, output_dir, source, tag=None, dtype=None, max_shard_size="50GB",
                      trust_remote_code=False):  # yapf: disable
    """Write what ``engine.save_hf_checkpoint`` would have written when the checkpoint was saved.

    At most one file of the output is in memory, and what one of its tensors is computed from where that is more than a
    view. Buffers keep the dtype that they were saved in.

    Args:
        checkpoint_dir: folder that was given to ``engine.save_checkpoint`` under ZeRO-3, with expert parallelism of
            the experts only or without.
        output_dir: folder for the files. Made when missing; a checkpoint in it stays until the new one is complete.
        source: folder or Hub name of the model that was trained: its ``config.json``, generation configuration and
            tokenizer are taken over.
        tag: which checkpoint; what ``latest`` names if None.
        dtype: ``torch.dtype`` of the parameters; what ``config.json`` says if None, float32 if it says nothing.
        max_shard_size: bytes, or a string such as ``"5GB"``, after which a new file begins.
        trust_remote_code: whether code that comes with ``source`` may run.

    Returns:
        list: names of the files with weights.

    Raises:
        ValueError: no checkpoint, an unfinished one, or one of another model; ``output_dir`` is then as before.
    """
    saved = _open(checkpoint_dir, tag)
    model = _model_on_meta(os.fspath(source), dtype, trust_remote_code)
    tensors, sources = _tensors(model, saved)
    plan = plan_files(model, tensors, saved.buffers, max_shard_size)

    def read(name, start, into):
        _read(saved, sources[name], start, into)

    with staged(os.fspath(output_dir)) as staging:
        save_config(model, None, staging)
        with tqdm(total=plan.nbytes, unit="B", unit_scale=True, desc="Exporting") as bar:
            for name, members in plan.files.items():
                _write_file(model, members, tensors, read, os.path.join(staging, name))
                bar.update(sum(tensor.nbytes for tensor in members.values()))
        plan.write_index(staging)
    return list(plan.files)


def _open(checkpoint_dir, tag):
    found = saved_tag(checkpoint_dir, tag)
    if found is None:
        raise ValueError(f"{checkpoint_dir}: found no file latest; allowed: the folder that was given to "
                         "save_checkpoint, or a tag")
    folder = os.path.join(checkpoint_dir, found)
    check_finished(folder)
    saved = SavedShards(folder)
    saved.check_complete()
    saved.check_joinable()
    return saved


def _model_on_meta(source, dtype, trust_remote_code):
    """The unmodified model, whose tensors have shapes only."""
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"MODEL: found {source}, of which Transformers reads no configuration ({error}); allowed: a "
                         "folder with config.json, or the name of a model on the Hub") from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what was trained is not quantized, and neither is what is written
    named = dtype or config.dtype or torch.float32
    options = dict(dtype=getattr(torch, named) if isinstance(named, str) else named)
    with torch.device("meta"):
        model = _constructor(config, source, trust_remote_code)(config, **options)
    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
        except OSError:
            pass  # it has none beside its configuration
    return model


def _constructor(config, source, trust_remote_code):
    """Function that builds the class which ``config.json`` names, from a configuration."""
    name = (config.architectures or [None])[0]
    if trust_remote_code:
        for kind, reference in (getattr(config, "auto_map", None) or {}).items():
            if isinstance(reference, str) and reference.rpartition(".")[2] == name:
                auto_class = getattr(transformers, kind)
                return lambda *args, **kwargs: auto_class.from_config(*args, trust_remote_code=True, **kwargs)
    found = getattr(transformers, name or "", None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"MODEL: found architectures {config.architectures} in the configuration of {source}; "
                         "allowed: the class of a model of Transformers, or of code that comes with the model and "
                         "--trust-remote-code")
    return found._from_config


def _tensors(model, saved):
    """What is to be written: name -> tensor on the meta device, tied names share one; and name -> name as saved."""
    buffers, names_of, tensors, sources, wanted = saved.buffers, {}, {}, {}, {}
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in names_of.values():
        # Of tied parameters one was saved. If another one was too, they were trained apart, and it is left over.
        source = next((name for name in names if name in saved.held or name in buffers), names[0])
        own = state[source]
        wanted.update({name: own.shape for name in names if name == source or name in buffers})
        dtype = buffers[source].dtype if source in buffers else own.dtype
        sources.update(dict.fromkeys(names, source))
        tensors.update(dict.fromkeys(names, torch.empty(own.shape, dtype=dtype, device="meta")))
    saved.check_model(wanted, "the parameters and buffers of MODEL")
    return {name: tensors[name] for name in state}, sources


def _read(saved, name, start, into):
    """Fill a flat tensor with elements of the whole tensor ``name``, from ``start`` on."""
    if name in saved.buffers:
        into.copy_(saved.buffers[name].flatten()[start:start + len(into)])
    else:
        saved.read(name, start, into=into)


def _write_file(model, members, tensors, read, path):
    made = {}
    for name, member in members.items():
        if name in made:
            continue
        if member.sections is not None:
            made[name] = _joined(member, read)
            continue
        inputs = {part: torch.empty(tensors[part].shape, dtype=tensors[part].dtype) for part in member.inputs}
        for part, whole in inputs.items():
            read(part, 0, whole.view(-1))
        made.update(saved_contents(model, inputs))
    save_file({name: made[name] for name in members}, path, metadata={"format": "pt"})


def _joined(member, read):
    """A tensor of a file, from the elements of the model's tensors that it is made of."""
    found = torch.empty(member.shape, dtype=member.dtype)
    for section in member.sections:
        source = section.source
        into = found.as_strided(section.shape, section.target.strides, section.target.offset)
        if into.is_contiguous() and source.strides == row_major(section.shape):
            read(source.tensor, source.offset, into.view(-1))
            continue
        around = torch.empty(1 + source.at([size - 1 for size in section.shape]) - source.offset, dtype=member.dtype)
        read(source.tensor, source.offset, around)
        into.copy_(around.as_strided(section.shape, source.strides))
    return found
