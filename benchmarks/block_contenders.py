# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""The experts blocks that ``benchmarks/block.py`` compares, all on the same weights.

A contender is made from ``(shape, gate_up [E, 2F, H], down [E, H, F])`` and called as ``(x [T, H], index [T, K],
weights [T, K]) -> [T, H]``. Nothing here is a copy of what it measures: each calls the code that is installed. A
package that is not there raises ImportError, one that cannot run on this device RuntimeError.
"""
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types

import torch
from torch.nn import Parameter
from torch.nn.functional import silu


class Contender:
    """Holds the expert weights as leaves in the layout of the model; ``setup`` imports what the call needs."""
    environment = {}  # for the process it runs in
    modules = ()  # that take long to import
    cuda_only = True
    default = True  # whether it runs without being named
    note = ""

    def __init__(self, shape, gate_up, down):
        if self.cuda_only and gate_up.device.type != "cuda":
            raise RuntimeError("needs CUDA")
        self.shape = shape
        self.gate_up, self.down = Parameter(gate_up), Parameter(down)
        self.setup()

    def setup(self):
        pass

    def parameters(self):
        return [self.gate_up, self.down]

    def gradients(self):
        """Gradients of (gate_up, down), in the layout of the model."""
        return self.gate_up.grad, self.down.grad


class Ours(Contender):
    """What a family's experts module computes with, once replaced (experts only)."""
    cuda_only = False
    environment = {"DS_AUTOEP": "1"}
    modules = ("deepspeed", )

    def setup(self):
        from deepspeed.moe.expert_activations import Activation
        from deepspeed.moe.expert_compute import ExpertWeights, compute_experts

        weights = ExpertWeights((self.gate_up, ), self.down, Activation("silu"))
        self.block = functools.partial(compute_experts, weights)

    def __call__(self, x, index, weights):
        return self.block(x, index, weights)


def qwen3_config(shape):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(num_experts=shape["E"], hidden_size=shape["H"], moe_intermediate_size=shape["F"],
                          num_experts_per_tok=shape["K"], experts_implementation="grouped_mm")  # yapf: disable


class Transformers(Contender):
    """The experts module of a model, with the implementation that Transformers chooses by default."""
    cuda_only = False
    modules = ("transformers.models.qwen3_moe.modeling_qwen3_moe", )

    def setup(self):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        with torch.device("meta"):
            self.module = Qwen3MoeExperts(qwen3_config(self.shape))
        self.module.gate_up_proj, self.module.down_proj = self.gate_up, self.down

    def __call__(self, x, index, weights):
        return self.module(x, index, weights)


class GivenRouting(torch.nn.Module):
    """Stands in for the router of DeepSpeed's layer. It counts, as that router does: the other contenders must too."""

    def forward(self, x, expert_bias):
        from deepspeed.moe.ep_count import count_tokens_per_expert

        return self.weights, self.index, count_tokens_per_expert(self.index, self.experts)


class DeepSpeed(Contender):
    """The layer that AutoEP puts in place of a model's MoE block, from its routing on."""
    cuda_only = False
    modules = (*Transformers.modules, "deepspeed.module_inject.auto_ep_layer")
    options = {}

    def setup(self):
        from deepspeed.module_inject.auto_ep import AutoEP
        from deepspeed.module_inject.auto_ep_config import AutoEPConfig
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        model = torch.nn.Module()
        model.config = qwen3_config(self.shape)
        model.model = torch.nn.Module()
        model.model.layers = torch.nn.ModuleList([torch.nn.Module()])
        with torch.device("meta"):
            block = Qwen3MoeSparseMoeBlock(model.config)
        block.experts.gate_up_proj, block.experts.down_proj = self.gate_up, self.down
        block.gate.weight = Parameter(self.gate_up.new_zeros(block.gate.weight.shape))
        model.model.layers[0].mlp = block
        # Their grouped GEMM path runs its activation in Triton, also on CPU tensors.
        config = AutoEPConfig(enabled=True, preset_model="qwen3_moe", use_grouped_mm=self.gate_up.is_cuda,
                              **self.options)  # yapf: disable
        spec, = AutoEP(model, config).ep_parser()
        self.layer = AutoEPMoELayer(spec, block, 1, 0, config)
        self.layer.router = GivenRouting()
        self.layer.router.experts = self.shape["E"]
        del self.gate_up, self.down  # it has copied them

    def parameters(self):
        return [self.layer.experts.w1, self.layer.experts.w2, self.layer.experts.w3]

    def gradients(self):
        gate, down, up = (parameter.grad for parameter in self.parameters())
        return torch.cat([gate, up], 1), down

    def __call__(self, x, index, weights):
        self.layer.router.weights, self.layer.router.index = weights, index
        return self.layer(x.unsqueeze(0)).squeeze(0)


class DeepSpeedCombine(DeepSpeed):
    note = "combine_impl fused_weighted_sum"
    options = dict(combine_impl="fused_weighted_sum")


class DeepSpeedFused(DeepSpeed):
    # row_weighting_impl is read by the DeepEP backend only, so that it changes nothing at EP=1.
    note = "combine_impl fused_weighted_sum, gate_up_impl fused"
    options = dict(combine_impl="fused_weighted_sum", gate_up_impl="fused")


class OursBlock(DeepSpeed):
    """The same layer, whole block, with the overlay."""
    environment = {"DS_AUTOEP": "1"}

    def setup(self):
        import deepspeed.comm as dist

        super().setup()
        if not dist.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            dist.init_distributed("gloo")
        self.layer.ep_group = torch.distributed.group.WORLD


class Liger(Contender):
    note = "one configuration per kernel"
    modules = ("liger_kernel.ops.fused_moe", )
    # Its search tries about 240 configurations for every shape, minutes of compiling; this is its own switch.
    environment = {"LIGER_FUSED_MOE_AUTOTUNE": "0"}

    def setup(self):
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        self.block = LigerFusedMoEFunction.apply

    def __call__(self, x, index, weights):
        return self.block(x, self.gate_up, self.down, index.int(), weights)


class LigerTuned(Liger):
    note = "with its search"
    environment = {}
    default = False


class MoeOps(Contender):
    note = "with its search, which takes over a minute"
    default = False
    modules = ("moe_ops", )

    def setup(self):
        import moe_ops
        self.ops = moe_ops

    def __call__(self, x, index, weights):
        rows, row_of, offsets = self.ops.permute(x, index.int(), E=self.shape["E"])
        gate, up = self.ops.grouped_gemm(rows, self.gate_up, offsets).chunk(2, dim=-1)
        rows = self.ops.grouped_gemm(silu(gate) * up, self.down, offsets)
        return self.ops.unpermute(rows, row_of, weights, *index.shape)


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"{package} is not installed")
    return spec.submodule_search_locations[0]


def stand_in(name, folder=None, **attributes):
    """Put an empty module in place of one whose import pulls in a training stack that the kernels do not need."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = [folder] if folder else []
    vars(module).update(attributes)


class ScatterMoE(Contender):
    """The kernels of ScatterMoE, as fms-acceleration-moe ships them."""

    def setup(self):
        name, folder = "fms_acceleration_moe", folder_of("fms_acceleration_moe")
        for part in ("", "utils", "scattermoe_utils"):
            name, folder = f"{name}.{part}".rstrip("."), os.path.join(folder, part).rstrip(os.sep)
            stand_in(name, folder)
        self.ops = importlib.import_module(f"{name}.khd.kernels.ops")

    def __call__(self, x, index, weights):
        experts, order = torch.sort(index.flatten())
        with torch.no_grad():
            blocks, offsets = self.ops.padded_block_indices(experts, self.shape["E"])
        where = (experts, order, blocks, offsets)
        # Its weights are [E, in, out] at any strides, so that these are views.
        rows = self.ops.scattered_experts(x, self.gate_up.transpose(1, 2), index.shape[1], *where, grouped_out=True)
        gate, up = rows.chunk(2, dim=-1)
        return self.ops.scattered_experts(silu(gate) * up, self.down.transpose(1, 2), 1, *where,
                                          gates=weights.to(x.dtype), grouped_in=True)  # yapf: disable


class Unsloth(Contender):
    """The Triton grouped GEMM of unsloth with the configuration that it takes without a search."""
    note = "its heuristic configuration"

    def setup(self):
        folder = folder_of("unsloth")
        capability = torch.cuda.get_device_capability()
        stand_in("unsloth", folder, DEVICE_TYPE="cuda")
        stand_in("unsloth.device_type", cuda_visible_capabilities=lambda: [capability])
        stand_in("unsloth.kernels", os.path.join(folder, "kernels"))
        stand_in("unsloth.kernels.utils", torch_gpu_device=torch.cuda.device)
        missing = importlib.util.find_spec("pandas") is None
        if missing:
            stand_in("pandas")  # for its tables of tuning results only
        from unsloth.kernels.moe.autotune_cache import _get_heuristic_configs
        from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm

        if missing:
            del sys.modules["pandas"]  # others ask whether it is there
        self.grouped_gemm = grouped_gemm
        self.configs = [
            dict(zip(("kernel_config_fwd", "kernel_config_bwd_dX", "kernel_config_bwd_dW"),
                     _get_heuristic_configs(n, k, torch.bfloat16, torch.bfloat16)))
            for n, k in (self.gate_up.shape[1:], self.down.shape[1:])
        ]  # yapf: disable

    def __call__(self, x, index, weights):
        experts, order = torch.sort(index.flatten(), stable=True)
        sizes = torch.histc(experts.float(), bins=self.shape["E"], min=0, max=self.shape["E"] - 1).int()
        where = dict(m_sizes=sizes, topk=index.shape[1], gather_indices=order)
        rows = self.grouped_gemm(x, self.gate_up, permute_x=True, **where, **self.configs[0])
        gate, up = rows.chunk(2, dim=-1)
        rows = self.grouped_gemm(silu(gate) * up, self.down, permute_y=True, is_first_gemm=False, **where,
                                 **self.configs[1])  # yapf: disable
        return (rows.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Sonic(Contender):
    note = "default configuration of every GEMM"
    modules = ("sonicmoe", )
    tuned = False

    def setup(self):
        from sonicmoe import functional, moe_general_routing_inputs
        from sonicmoe.enums import ActivationType

        self.block, self.activation = moe_general_routing_inputs, ActivationType.SWIGLU
        # Its search compiles about twenty kernels for each of six products and repeats for every number of tokens.
        for module in (functional, functional.forward, functional.backward):
            for name in {"gemm", "gemm_gated", "gemm_dgated"} & vars(module).keys():
                setattr(module, name, functools.partial(getattr(module, name), tuned=self.tuned))

    def __call__(self, x, index, weights):
        tokens = torch.arange(len(x), device=x.device, dtype=torch.int32).repeat_interleave(index.shape[1])
        stream = torch.cuda.current_stream().cuda_stream
        return self.block(x, weights.flatten(), tokens, index.flatten().int(), self.gate_up.permute(1, 2, 0), None,
                          self.down.permute(1, 2, 0), None, self.shape["E"], stream, self.activation,
                          concat_layout=True)[0]  # yapf: disable


class SonicTuned(Sonic):
    note = "with its search"
    default = False
    tuned = True


CONTENDERS = {
    "ours": Ours,
    "ours-block": OursBlock,
    "transformers": Transformers,
    "deepspeed-default": DeepSpeed,
    "deepspeed-combine": DeepSpeedCombine,
    "deepspeed-fused": DeepSpeedFused,
    "liger": Liger,
    "liger-tuned": LigerTuned,
    "moe-ops": MoeOps,
    "scattermoe": ScatterMoE,
    "unsloth": Unsloth,
    "sonic-moe": Sonic,
    "sonic-moe-tuned": SonicTuned,
}
