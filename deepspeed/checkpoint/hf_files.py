# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which tensors go into which file of a Hugging Face checkpoint, and the files beside the weights."""
import json
import os
import shutil
from typing import NamedTuple

from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from deepspeed.checkpoint.hf_layout import file_tensors
from deepspeed.checkpoint.staging import INDEX_FILE, SINGLE_FILE

# Of tokenizers and processors, which a model's folder usually has beside the weights.
_CARRIED_OVER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                 "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja",
                 "chat_template.json", "processor_config.json", "preprocessor_config.json",
                 "video_preprocessor_config.json")  # yapf: disable


class FilePlan(NamedTuple):
    """What a checkpoint is to consist of.

    Attributes:
        files: file name -> name -> ``Converted``, in the order in which ``save_pretrained`` writes them.
        split: the same as Transformers sees it.
        parameters: number of the model's parameters.
    """
    files: dict
    split: StateDictSplit
    parameters: int

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())

    def write_index(self, folder):
        """Write the index that a checkpoint of several files has."""
        if not self.split.is_sharded:
            return
        index = {"metadata": {"total_parameters": self.parameters, **self.split.metadata},
                 "weight_map": self.split.tensor_to_filename}  # yapf: disable
        with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def plan_files(model, tensors, buffers, max_shard_size):
    """The ``FilePlan`` of ``model``; nothing is written.

    Args:
        model: a ``PreTrainedModel``.
        tensors: name in its state dict -> tensor on the meta device; tied names share one.
        buffers: names of those that are no parameters.
        max_shard_size: bytes, or a string such as ``"5GB"``, after which a new file begins.
    """
    names = _untied(model, tensors)
    found = file_tensors(model, {name: tensors[name] for name in names})
    split = _split(found, max_shard_size)
    files = {file: {name: found[name] for name in members} for file, members in split.filename_to_tensors.items()}
    return FilePlan(files, split, sum(tensors[name].numel() for name in names if name not in buffers))


def _untied(model, tensors):
    """Names that are saved: of tied tensors one each, and none that the family never saves."""
    own = {name: tensor for name, tensor in tensors.items() if _is_own(model, name)}  # all but a replaced block's
    dropped = set(own) - set(remove_tied_weights_from_state_dict(dict(own), model))
    return [name for name in tensors if name not in dropped and name not in (model._keys_to_ignore_on_save or ())]


def _is_own(model, name):
    try:
        return model.get_parameter_or_buffer(name) is not None
    except AttributeError:
        return False


def _split(files, max_shard_size):
    """How ``save_pretrained`` would spread the tensors over files: those that share memory stay together."""
    nbytes = {}
    for tensor in files.values():
        nbytes[tensor.memory] = nbytes.get(tensor.memory, 0) + tensor.nbytes
    return split_state_dict_into_shards_factory(files,
                                                get_storage_size=lambda tensor: nbytes[tensor.memory],
                                                get_storage_id=lambda tensor: tensor.memory,
                                                filename_pattern=SINGLE_FILE.replace(".", "{suffix}."),
                                                max_shard_size=max_shard_size)


def save_config(model, tokenizer, staging):
    """Write configurations and the tokenizer, or without one the files of that which the model was loaded with."""
    model.save_pretrained(staging, state_dict={})  # configurations and, for remote code, its files; no weights
    if tokenizer is not None:
        tokenizer.save_pretrained(staging)
        return
    for name in _CARRIED_OVER:
        path = _file_of_source(model.config._name_or_path, name)
        if path is not None:
            shutil.copy(path, staging)


def _file_of_source(source, name):
    """Where the file ``name`` is that belongs to a folder or to a repository in the Hub's cache, or None."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
    else:
        try:
            path = try_to_load_from_cache(source, name)
        except HFValidationError:
            return None
    return path if isinstance(path, str) and os.path.isfile(path) else None
