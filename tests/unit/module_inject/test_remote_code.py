# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""A model whose experts are a list of modules, as remote code has them, trains by names that the block gives.

Nothing of it is Transformers': not the classes, not the names, no config beyond a model type.
"""
import types

import pytest
import torch
import torch.nn.functional as F

import families
from engines import ds_config
from family_parity import FLOAT32_BOUND, assert_parity, check, compare_family
from ranks import rank_group

HIDDEN, FFN, SPECIALISTS = 16, 12, 6
NAMES = dict(moe_layer_pattern=r"trunk\.\d+\.panel", router_pattern="switch", expert_pattern="specialists",
             expert_w1="gate_proj", expert_w2="down_proj", expert_w3="up_proj", top_k=2, has_shared_experts=True,
             shared_experts_pattern="generalist")  # yapf: disable

two_ranks = rank_group(2)


class Specialist(torch.nn.Module):

    def __init__(self, ffn=FFN):
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, ffn, bias=False)
        self.up_proj = torch.nn.Linear(HIDDEN, ffn, bias=False)
        self.down_proj = torch.nn.Linear(ffn, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Panel(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.switch = torch.nn.Linear(HIDDEN, SPECIALISTS, bias=False)
        self.specialists = torch.nn.ModuleList(Specialist() for _ in range(SPECIALISTS))
        self.generalist = Specialist(20)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        shares, chosen = self.switch(tokens).softmax(-1).topk(2)
        shares = shares / shares.sum(-1, keepdim=True)
        answers = torch.zeros_like(tokens)
        for number, specialist in enumerate(self.specialists):
            token, place = torch.where(chosen == number)
            if len(token):
                answers = answers.index_add(0, token, specialist(tokens[token]) * shares[token, place, None])
        return answers.view_as(x) + self.generalist(x)


class Layer(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.norm, self.mix = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.panel = Panel()

    def forward(self, x):
        x = x + self.mix(x.cumsum(1) / x.shape[1])
        return x + self.panel(self.norm(x))


class RemoteCode(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(model_type="remote_code")
        self.embed = torch.nn.Embedding(families.VOCABULARY, HIDDEN)
        self.trunk = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(HIDDEN, families.VOCABULARY, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.trunk:
            x = layer(x)
        return dict(logits=self.head(x))


def remote_code():
    torch.manual_seed(5)
    model = RemoteCode()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.normal_(std=0.3)
    return model


def ids(model, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    return dict(input_ids=torch.randint(0, families.VOCABULARY, (2, 8), generator=generator))


def grouped(tensors):
    """The tensors of all parameters under the names, and with the experts stacked, as ``parity.gathered`` has them."""
    others = {name: tensor for name, tensor in tensors.items() if ".specialists." not in name}
    renamed = {
        name.replace("switch", "gate").replace("generalist", "shared_experts"): tensor
        for name, tensor in others.items()
    }
    for panel in {name.partition(".specialists.")[0] for name in tensors.keys() - others.keys()}:
        gate, up, down = ([tensors[f"{panel}.specialists.{number}.{kind}.weight"] for number in range(SPECIALISTS)]
                          for kind in ("gate_proj", "up_proj", "down_proj"))  # yapf: disable
        renamed[f"{panel}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        renamed[f"{panel}.experts.down_proj"] = torch.stack(down)
    return renamed


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_a_list_of_experts(two_ranks, ep, partitioned):
    results = check(two_ranks, remote_code, ds_config(ep, block=NAMES), make_inputs=ids, rename=grouped,
                    partitioned=partitioned)  # yapf: disable
    assert [errors["experts"] for errors in results] == [2, 2]


def test_the_comparison_notices_gate_and_up_swapped(two_ranks):
    """The negative control, and what a wrong name would do."""
    config = ds_config(2, block={**NAMES, "expert_w1": "up_proj", "expert_w3": "gate_proj"})
    results = two_ranks.run(compare_family, remote_code, config, make_inputs=ids, rename=grouped)
    with pytest.raises(AssertionError, match="loss beyond"):
        assert_parity(results, FLOAT32_BOUND)
