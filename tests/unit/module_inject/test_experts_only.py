# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Finding, refusing, marking and saving experts whose block stays; families that Transformers does not have."""
import json

import pytest
import torch
import transformers
from transformers.integrations.moe import use_experts_implementation

import families
import tiny_models
from engines import ds_config
from ranks import rank_group

two_ranks = rank_group(2)


@use_experts_implementation
class Specialists(torch.nn.Module):
    """The experts of a family made up here: the decorator is all that it shares with others."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.act_fn = 6, torch.nn.SiLU()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(6, 24, 16) * 0.3)
        self.down_proj = torch.nn.Parameter(torch.randn(6, 16, 12) * 0.3)

    def forward(self, x, chosen, shares):
        rows = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = torch.where(chosen == expert)
            gate, up = (x[token] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            out = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            rows = rows.index_add(0, token, out * shares[token, place, None])
        return rows


class Committee(torch.nn.Module):

    def __init__(self, config):
        super().__init__()
        self.chooser = torch.nn.Linear(16, 6)
        self.specialists = Specialists(config)

    def forward(self, x):
        shares, chosen = self.chooser(x).softmax(-1).topk(2)
        return x + self.specialists(x.flatten(0, 1), chosen.flatten(0, 1), shares.flatten(0, 1)).view_as(x)


class Parliament(transformers.PreTrainedModel):
    """A family added tomorrow: unusual names around the experts, routed on inputs of ``[2, 5, 16]``."""
    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.config._experts_implementation = "eager"
        self.chambers = torch.nn.ModuleList(Committee(config) for _ in range(2))

    def forward(self, x):
        for chamber in self.chambers:
            x = chamber(x)
        return x


def parliament():
    torch.manual_seed(3)
    return Parliament(transformers.PretrainedConfig())


def made_up_family(folder):
    """Errors against the model in one process after two steps, marked parameters, and what saving says."""
    import deepspeed
    import deepspeed.comm as dist

    from engines import ADAMW
    from family_parity import weight_of, gradient_of
    from parity import gathered, relative_errors

    inputs = torch.randn(2, 2, 2, 5, 16, generator=torch.Generator().manual_seed(1))  # step, rank, ...
    reference, errors = parliament(), {}
    optimizer = torch.optim.AdamW(reference.parameters(), **ADAMW)
    model = parliament()
    engine = deepspeed.initialize(model=model, config=ds_config(2), model_parameters=model.parameters())[0]
    for step in inputs:
        optimizer.zero_grad()
        torch.stack([reference(x).square().mean() for x in step]).mean().backward()
        engine.backward(engine(step[dist.get_rank()]).square().mean())
        expected = {name: param.grad for name, param in reference.named_parameters()}
        errors.update(relative_errors(gathered(engine.module, gradient_of), expected))
        optimizer.step()
        engine.step()
    expected = {name: param.detach() for name, param in reference.named_parameters()}
    errors.update({
        f"{name}.weight": error
        for name, error in relative_errors(gathered(engine.module, weight_of), expected).items()
    })
    persistent = [name for name, p in engine.module.named_parameters() if getattr(p, "ds_force_persist", False)]
    refused = {}
    for how in (lambda: engine.module.state_dict(), lambda: engine.module.save_pretrained(folder)):
        try:
            how()
        except RuntimeError as error:
            refused[len(refused)] = str(error)
    engine.destroy()
    return errors, persistent, refused


def test_a_family_added_tomorrow(two_ranks, tmp_path):
    for errors, persistent, refused in two_ranks.run(made_up_family, str(tmp_path / "saved")):
        assert max(errors.values()) < 1e-5, errors
        assert persistent == [f"chambers.{n}.chooser.{kind}" for n in (0, 1) for kind in ("weight", "bias")]
        assert len(refused) == 2
        assert all("chambers.0.specialists: found 3 of 6 experts" in message for message in refused.values())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "afmoe", "hunyuan_v1_moe", "zaya", "gemma4"])
def test_routers_are_found(family):
    from deepspeed.module_inject.experts_only import find_experts
    from deepspeed.moe.experts_interface import router_parameters

    model = families.build(family)
    for spec in find_experts(model):
        parent = spec.moe_module_name.rpartition(".")[0]
        router = next(name for name in ("router", "gate") if hasattr(model.get_submodule(parent), name))
        expected = {id(p) for p in model.get_submodule(f"{parent}.{router}").parameters()}
        assert {id(p) for p in router_parameters(model, spec.moe_module_name)} == expected


def refused(spoil, config):
    """Initialize an engine for a tiny model after ``SPOILED[spoil]``."""
    import deepspeed
    model = tiny_models.build("qwen3_moe")
    SPOILED[spoil][0](model.model.layers[1].mlp)
    deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())


def _patched(block):
    block.experts.forward = lambda *args: None


def _split_already(block):
    block.experts._is_expert_parallel = True


def _scaled(block):
    block.experts.register_buffer("gate_up_proj_scale", torch.ones(tiny_models.EXPERTS, 1))


def _quantized(block):
    block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj.data.to(torch.float8_e4m3fn),
                                                 requires_grad=False)


def _misshapen(block):
    block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj.data[:-1])


def _with_adapter(block):
    adapter = torch.nn.Module()  # as peft wraps what its target_parameters name
    adapter.base_layer = block.experts
    block.experts = adapter


SPOILED = {
    "hooked": (_patched, "forward that was replaced on the instance"),
    "adapted": (_with_adapter, "experts with an adapter on their tensors"),
    "split by Transformers": (_split_already, "Transformers' own expert parallelism on"),
    "scales": (_scaled, "gate_up_proj_scale (6, 1), a tensor per expert"),
    "quantized": (_quantized, "float8_e4m3fn; allowed: weights that can be trained"),
    "one expert short": (_misshapen, "down_proj (5, 24, 8); allowed: 3 dimensions, the first of num_experts=6"),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_experts_that_cannot_be_split(two_ranks, spoil):
    for error in two_ranks.errors(refused, spoil, ds_config(2)):
        assert error.startswith("ValueError: expert_parallel: found model.layers.1.mlp.experts"), error
        assert SPOILED[spoil][1] in error, error


def test_a_degree_that_fits_some_layers_only():
    from deepspeed.module_inject.experts_only import check_experts, find_experts

    model = families.build("dots3_note:vision")
    with pytest.raises(ValueError, match=r"found 8, .* of blocks\.1\.mlp\.experts \(E=4\); allowed: 1, 2, 4$"):
        check_experts(model, find_experts(model), 8)


SMALL = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, num_experts=4, num_local_experts=4, num_heads=2, num_layers=1, d_model=16, d_ff=16,
             d_kv=8)  # yapf: disable


def build_unsupported(model_type):
    config = transformers.AutoConfig.for_model(model_type, **SMALL)
    mapping = transformers.AutoModelForSeq2SeqLM if model_type == "switch_transformers" else \
        transformers.AutoModelForCausalLM
    return mapping.from_config(config)


@pytest.mark.parametrize("model_type", ["llama4_text", "doge", "jetmoe", "switch_transformers"])
def test_a_family_outside_the_interface_is_named(model_type):
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    from deepspeed.moe.experts_interface import UNSUPPORTED_FAMILIES

    config = parse_autoep_config(dict(enabled=True, autoep_size=2))
    with pytest.raises(ValueError, match=f"'{model_type}'") as raised:
        AutoEP(build_unsupported(model_type), config).ep_parser()
    assert UNSUPPORTED_FAMILIES[model_type] in str(raised.value)


def resumed(folder):
    """Losses of three steps after a checkpoint: by the engine that saved it, and by another one that loaded it."""
    import deepspeed
    import deepspeed.comm as dist

    def engine_of_seed(seed):
        model = families.build("gpt_oss", seed=seed)
        return deepspeed.initialize(model=model, config=ds_config(2), model_parameters=model.parameters())[0]

    def train(engine, steps):
        losses = []
        for step in steps:
            loss = families.scalar_loss(
                engine(**families.inputs("gpt_oss", engine.module, 10 * step + dist.get_rank())))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine = engine_of_seed(0)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    expected = train(engine, range(2, 5))
    engine.destroy()
    engine = engine_of_seed(1)
    engine.load_checkpoint(folder)
    found = train(engine, range(2, 5))
    engine.destroy()
    return found, expected


def test_a_checkpoint_resumes_to_the_last_digit(two_ranks, tmp_path):
    for found, expected in two_ranks.run(resumed, str(tmp_path)):
        assert json.dumps(found) == json.dumps(expected)
