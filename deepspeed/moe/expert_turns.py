# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layers with several experts modules, some of which a rank may not call: vision experts on a batch of text.

The other ranks would wait for it for ever. Before such a module computes, all ranks agree which one is next; a rank
that wants another one takes part without tokens and asks again, and at the end of the layer it does so until every
rank is there. Layers with one experts module need none of this and pay nothing.
"""
import itertools
import re
from collections import defaultdict

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.persistence import force_persist, gather_persistent, untrace
from deepspeed.utils import groups

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def take_turns(model, experts_names):
    """Let the experts modules that belong to one layer of ``model`` wait for each other."""
    layers = defaultdict(list)
    for name in experts_names:
        match = re.match(r"(.*\.)?\d+\.", name)
        layers[match and match.group()].append(name)
    for names in layers.values():
        if len(names) > 1 and (layer := _common_ancestor(names)) is not None:
            Turns(model, layer, names)


def _common_ancestor(names):
    """The innermost module above all of ``names``, or None for one that is only a list of layers."""
    parts = [name.split(".") for name in names]
    shared = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts))]
    rest = [name[len(shared):] for name in parts]
    return None if any(part.isdigit() for path in rest for part in path) else ".".join(shared)


def _tokens(args, kwargs):
    return next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.is_floating_point())


class Turns:
    """Whose turn it is among the experts modules of one layer, on all ranks alike."""

    def __init__(self, model, layer_name, experts_names):
        self._experts = [model.get_submodule(name) for name in experts_names]
        layer = model.get_submodule(layer_name)
        self._branches = [layer.get_submodule(name[len(layer_name) + 1:].split(".")[0]) for name in experts_names]
        for module in self._experts:  # before ZeRO-3's own hook, which waits for the ranks that hold the same experts
            module.register_forward_pre_hook(self._wait_for, with_kwargs=True)
        inside = {id(module) for experts in self._experts for module in experts.modules()}
        for branch in self._branches:
            for module in branch.modules():
                if id(module) not in inside:
                    untrace(module)
        self._joined, self._taking_part = [], False
        # Methods, all of them: a deep copy of the model then has copied turns, among copied experts.
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._end, with_kwargs=True)

    def _begin(self, layer, args):
        self._joined = []
        gather_persistent(param for branch in self._branches for param in branch.parameters() if force_persist(param))

    def _wait_for(self, experts, args, kwargs):
        """Return when ``experts`` is next on all ranks; take part in what other ranks compute before."""
        index = self._experts.index(experts)
        if not self._taking_part:
            self._take_part_before(index, _tokens(args, kwargs))
        # Every rank gives the same parameters of the branch a gradient, after that of the experts, or the ranks would
        # reduce different ones together. With tokens or without: a bias that only selects gets none by itself.
        values = dict(zip(_ARGUMENTS, args), **kwargs)
        branch = [
            param for param in self._branches[index].parameters() if force_persist(param) and param.requires_grad
        ]
        values["top_k_weights"] = values["top_k_weights"] + sum(param.sum() * 0 for param in branch)
        return tuple(values[name] for name in _ARGUMENTS), {}  # by position: ZeRO-3's hooks see no others

    def _take_part_before(self, index, hidden_states):
        group = groups._get_data_parallel_group()
        while True:
            turn = torch.tensor(index, device=hidden_states.device)
            dist.all_reduce(turn, op=dist.ReduceOp.MIN, group=group)
            if turn.item() == index:
                return
            self._take_part(turn.item(), hidden_states)

    def _take_part(self, index, hidden_states):
        no_tokens = hidden_states.reshape(-1, hidden_states.shape[-1])[:0]
        weights = no_tokens.new_zeros(0, 1)
        self._taking_part = True
        try:
            output = self._experts[index](no_tokens, no_tokens.new_zeros(0, 1, dtype=torch.int64), weights)
        finally:
            self._taking_part = False
        self._joined.append(output.sum())

    def _end(self, layer, args, kwargs, output):
        """Take part until every rank has left the layer; the output then depends on what was taken part in."""
        self._take_part_before(len(self._experts), _tokens(args, kwargs))
        first = output[0] if isinstance(output, tuple) else output
        # The factor is a tensor kept for backward. Recomputing a layer stops where the last such tensor is made, which
        # would be a place inside the layer, another one on every rank, and some would wait for others here.
        first = first * first.new_ones(()) + sum(self._joined)  # of no tokens: zero, for the graph alone
        return (first, *output[1:]) if isinstance(output, tuple) else first
