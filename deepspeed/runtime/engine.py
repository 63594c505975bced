# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where AutoEP enters the engine."""
import contextlib
import copy
import gc
import os

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import (AUTOEP_LAYERS_KEY, AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY,
                                            AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT)
from deepspeed.checkpoint.safe_save import can_save_safely, check_finished, failing_later, saved_tag, saving_whole
from deepspeed.checkpoint.whole_weights import write_script
from deepspeed.checkpoint.zero3_load import ReadAlready, loading_from, read_for, spread_layers
from deepspeed.checkpoint.zero3_shards import is_spread
from deepspeed.comm.agreement import failing_together
from deepspeed.module_inject.experts_only import (EXPERTS_ONLY_KEYS, ExpertParallelExperts, ExpertsSpec, check_experts,
                                                  local_state)
from deepspeed.moe.reshard_exchange import bucket_bytes_of
from deepspeed.runtime.zero.expert_partitioning import replacing_layers_of
from deepspeed_autoep.extension import adds, extends


def _check_model(engine, model):
    """Raise for a model that the ``expert_parallel`` block cannot be applied to, before any process group is made."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import validate_autoep_post_detection
    from deepspeed.module_inject.auto_ep_presets.registry import preset_name_for_hf_model_type

    chosen = engine._config.expert_parallel_config.preset_model
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    fitting = preset_name_for_hf_model_type(model_type)
    if chosen is not None and fitting is not None and chosen != fitting:
        # Blocks of different families look alike; the wrong preset would drop shared experts or route differently.
        raise ValueError(f"expert_parallel.preset_model: found {chosen!r} for a model of type {model_type!r}; "
                         f"allowed: {fitting!r}, or no preset_model at all")
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if on_meta is not None:
        raise ValueError(
            f"expert_parallel: found parameter '{on_meta}' on the meta device, without contents; allowed: "
            "parameters on a device, or partitioned. Build or load the model inside "
            "deepspeed.zero.Init, or without a meta device.")
    config = copy.copy(engine._config.expert_parallel_config)  # detection fills in what the model's config says
    specs = AutoEP(model, config).ep_parser()
    if isinstance(specs[0], ExpertsSpec):
        _refuse_keys_of_blocks(engine._config._param_dict["expert_parallel"])
        check_experts(model, specs, config.autoep_size)
    validate_autoep_post_detection(config, specs)


def _refuse_keys_of_blocks(block):
    unused = sorted(set(block) - EXPERTS_ONLY_KEYS)
    if unused:
        raise ValueError(
            f"expert_parallel: found {', '.join(unused)}, of DeepSpeed's replacement of whole MoE blocks, "
            "while only the experts of this model are replaced; allowed: leaving them out, or "
            "preset_model to replace whole blocks")


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="config-errors",
         why="a model that the block does not fit is refused on every rank before the first collective")
def refuse_unfit_model(self, model, *args, **kwargs):
    if self._config.expert_parallel_config.enabled:
        _check_model(self, model)
    return refuse_unfit_model.original(self, model, *args, **kwargs)


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="partitioned-experts",
         why="the engine's configuration decides how a layer's new experts are partitioned")
def replace_with_partitioned_experts(self, model, *args, **kwargs):
    block = self._config.expert_parallel_config
    if not (block.enabled and self.zero_optimization_partition_weights()):
        return replace_with_partitioned_experts.original(self, model, *args, **kwargs)
    config = self._config._param_dict
    with replacing_layers_of(model, config, bucket_bytes_of(config)):
        replaced = replace_with_partitioned_experts.original(self, model, *args, **kwargs)
    gc.collect()  # a ZeRO parameter's own methods close over it: only the collector frees what was replaced
    return replaced


def _remaps_optimizers(engine_module):
    return hasattr(engine_module, "_remap_client_optimizer_after_module_replacement")


def _experts_and_rest(module):
    """Parameters of a MoE block or layer: those of its experts, and all others."""
    experts = list(module.experts.parameters())
    return experts, [param for param in module.parameters() if all(param is not other for other in experts)]


@extends("DeepSpeedEngine._configure_expert_parallel",
         feature="stale-optimizers",
         why="what each layer's parameters replace is remembered for an optimizer that was made before",
         unless=_remaps_optimizers)
def remember_sources(self, model, *args, **kwargs):
    self._expert_parallel_sources = {
        name: [{id(param)
                for param in part} for part in _experts_and_rest(block)]
        for name, block in model.named_modules()
        if self._config.expert_parallel_config.enabled and isinstance(getattr(block, "experts", None), torch.nn.Module)
    }
    return remember_sources.original(self, model, *args, **kwargs)


@extends("DeepSpeedEngine._check_for_duplicates",
         feature="stale-optimizers",
         why="up to 0.19.6 an optimizer made before the replacement trains the discarded experts, silently",
         unless=_remaps_optimizers)
def move_stale_optimizer(self, optimizer):
    live = {id(param) for param in self.module.parameters()}
    for group in optimizer.param_groups if self._config.expert_parallel_config.enabled else ():
        stale = {id(param) for param in group["params"]} - live
        group["params"] = [param for param in group["params"] if id(param) in live]
        owned = {id(param) for other in optimizer.param_groups for param in other["params"]}
        for name, parts in self._expert_parallel_sources.items():
            for ids, params in zip(parts, _experts_and_rest(self.module.get_submodule(name))):
                if ids & stale:  # its place is in the group of what it replaces
                    group["params"] += [param for param in params if id(param) not in owned]
    return move_stale_optimizer.original(self, optimizer)


def _spreads_experts(engine, operation):
    """Whether ``engine`` has experts that are spread; raise when they are not in ZeRO-3's shards."""
    if not any(isinstance(module, ExpertParallelExperts) for module in engine.module.modules()):
        return False
    if not engine.zero_optimization_partition_weights():
        raise NotImplementedError(
            f"{operation}: found zero_optimization.stage={engine.zero_optimization_stage()} with "
            "expert parallelism of the experts only; allowed: stage 3, or "
            "expert_parallel.preset_model to replace whole blocks")
    return True


@contextlib.contextmanager
def _experts_like_any_parameter(engine):
    """Let ZeRO-3 save or load experts by their shards, as any parameter; DeepSpeed's way knows whole blocks only."""
    moe_layers, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        with local_state():
            yield
    finally:
        engine.has_moe_layers = moe_layers


@extends("DeepSpeedEngine.save_checkpoint", feature="experts-only", why="experts are saved by their ZeRO-3 shards")
def save_checkpoint(self, *args, **kwargs):
    if not _spreads_experts(self, "save_checkpoint"):
        return save_checkpoint.original(self, *args, **kwargs)
    spread_layers(self)  # which ranks hold what, while no rank can have failed
    with _experts_like_any_parameter(self):
        return save_checkpoint.original(self, *args, **kwargs)


@extends("DeepSpeedEngine.save_checkpoint",
         feature="safe-saving",
         why="a checkpoint is there whole or not at all; ranks fail together when one cannot write")
def save_whole_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, *args, **kwargs):
    save = save_whole_checkpoint.original
    if not (save_dir and _spreads_experts(self, "save_checkpoint") and can_save_safely(self)):
        return save(self, save_dir, tag, client_state, save_latest, *args, **kwargs)
    tag = f"global_step{self.global_steps}" if tag is None else str(tag)
    with saving_whole(self, save_dir, tag, save_latest) as written:
        return save(self, save_dir, written, client_state, False, *args, **kwargs)


@extends("DeepSpeedEngine._save_checkpoint",
         feature="safe-saving",
         why="a rank that cannot write does not leave others waiting")
def write_model_states(self, *args, **kwargs):
    with failing_later():
        return write_model_states.original(self, *args, **kwargs)


@extends("DeepSpeedEngine._save_zero_checkpoint",
         feature="safe-saving",
         why="a rank that cannot write does not leave others waiting")
def write_optimizer_states(self, *args, **kwargs):
    with failing_later():
        return write_optimizer_states.original(self, *args, **kwargs)


@extends("DeepSpeedEngine.load_checkpoint",
         feature="checkpoint-topology",
         why="checkpoints load across numbers of ranks and expert-parallel degrees, also to and from plain ZeRO-3")
def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                    load_lr_scheduler_states=True, load_module_only=False, *args, **kwargs):  # yapf: disable
    options = dict(load_module_strict=load_module_strict,
                   load_optimizer_states=load_optimizer_states,
                   load_lr_scheduler_states=load_lr_scheduler_states,
                   load_module_only=load_module_only)
    spreads = _spreads_experts(self, "load_checkpoint")
    found = saved_tag(load_dir, tag) if self.zero_optimization_partition_weights() else None
    folder = found and os.path.join(load_dir, found)
    if found is None or self.load_universal_checkpoint() or not (spreads or is_spread(folder)):
        return load_checkpoint.original(self, load_dir, tag, *args, **options, **kwargs)
    layers = spread_layers(self)  # with a collective of its own, the first time
    with failing_together(dist.get_world_group()):
        check_finished(folder)
        read = read_for(self, layers, folder, load_module_strict, load_module_only or not load_optimizer_states)
    with loading_from(self, read):
        return load_checkpoint.original(self, load_dir, found, *args, **options, **kwargs)


@extends("DeepSpeedEngine._load_checkpoint",
         feature="checkpoint-topology",
         why="experts are loaded by their ZeRO-3 shards, and weights alone too")
def load_model_states(self, load_dir, tag, load_module_strict=True, load_optimizer_states=True, *args, **kwargs):
    if not isinstance(self.checkpoint_engine, ReadAlready):
        return load_model_states.original(self, load_dir, tag, load_module_strict, load_optimizer_states, *args,
                                          **kwargs)
    with _experts_like_any_parameter(self):  # asked for optimizer states, or it would consolidate the whole model
        return load_model_states.original(self, load_dir, tag, load_module_strict, True, *args, **kwargs)


@extends("DeepSpeedEngine._get_all_ckpt_names",
         feature="checkpoint-topology",
         why="a rank that the saving job did not have finds a file")
def find_model_states(self, *args, **kwargs):
    if isinstance(self.checkpoint_engine, ReadAlready):
        return [self.checkpoint_engine.path]
    return find_model_states.original(self, *args, **kwargs)


@extends(
    "DeepSpeedEngine._common_checkpoint_state",
    feature="experts-only",
    why="the checkpoint says whose experts a shard belongs to; DeepSpeed's zero_to_fp32 would join different ones")
def mark_partitioned_experts(self, *args, **kwargs):
    state = mark_partitioned_experts.original(self, *args, **kwargs)
    layers = spread_layers(self)
    if layers:
        mark = {AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY: AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT}
        state[AUTOEP_LAYERS_KEY] = [{**mark, **layer} for layer in layers]
    return state


_HF = "hf-checkpoint"


@adds("DeepSpeedEngine.save_hf_checkpoint",
      feature=_HF,
      why="a trained model comes out as a plain Hugging Face folder")
def save_hf_checkpoint(self, save_dir, max_shard_size="50GB", tokenizer=None):
    """See ``deepspeed.checkpoint.hf_export.save_hf_checkpoint``."""
    from deepspeed.checkpoint import hf_export  # imports Transformers, which a job with experts has loaded already

    hf_export.save_hf_checkpoint(self, save_dir, max_shard_size, tokenizer)


@extends("DeepSpeedEngine._raise_if_autoep_zero3_consolidated_export",
         feature=_HF,
         why="consolidating experts that are spread over ranks is not an error any more")
def allow_consolidated_export(self, operation):
    """Nothing to raise."""


@extends("DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
         feature=_HF,
         why="Trainer, Accelerate and save_16bit_model get the whole model, under the names of the unmodified one")
def consolidated_state_dict(self, exclude_frozen_parameters=False):
    if not self._has_autoep_layers():
        return consolidated_state_dict.original(self, exclude_frozen_parameters)
    from deepspeed.checkpoint import hf_export

    return hf_export.consolidated_state_dict(self, exclude_frozen_parameters)


@extends("DeepSpeedEngine._copy_recovery_script",
         feature="zero-to-fp32",
         why="a copy of DeepSpeed's converter is not extended; the script beside a checkpoint calls the installed one")
def write_recovery_script(self, save_path):
    write_recovery_script.original(self, save_path)
    if spread_layers(self):
        write_script(save_path)


@extends("DeepSpeedEngine.save_16bit_model",
         feature=_HF,
         why="below ZeRO-3 a rank has the whole model but for other ranks' experts")
def save_16bit_model(self, *args, **kwargs):
    if not self._has_autoep_layers() or self.zero_optimization_partition_weights():
        return save_16bit_model.original(self, *args, **kwargs)
    self.module_state_dict = self._zero3_consolidated_16bit_state_dict  # as stage 3 gets it, all ranks together
    try:
        return save_16bit_model.original(self, *args, **kwargs)
    finally:
        del self.module_state_dict
