# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Faults that reviewers found in an earlier attempt at AutoEP with ZeRO-3, which must stay out."""
import pytest

import tiny_models
from engines import autoep_layers, ds_config, engine_of
from ranks import rank_group

four_ranks = rank_group(4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny_models.build("qwen3_moe").save_pretrained(folder)
    return str(folder)


def groups_after_boolean_calls(checkpoint):
    """Global ranks of a layer's EP group, at first and after ``set_deepspeed_parallelism`` with either boolean."""
    import deepspeed.comm as dist

    with engine_of(checkpoint, ds_config(2, preset="qwen3_moe")) as engine:
        layer = next(iter(autoep_layers(engine.module).values()))
        seen = [dist.get_all_ranks_from_group(layer.ep_group)]
        for use_data_before_expert_parallel in (True, False):
            layer.set_deepspeed_parallelism(use_data_before_expert_parallel)
            seen.append(dist.get_all_ranks_from_group(layer.ep_group))
        return seen


def test_a_boolean_does_not_overwrite_the_expert_parallel_group(four_ranks, checkpoint):
    for rank, seen in enumerate(four_ranks.run(groups_after_boolean_calls, checkpoint)):
        first = rank - rank % 2
        assert seen == [[first, first + 1]] * 3


def counted_and_expected_tokens(checkpoint):
    """Tokens per expert of the first layer: as the layer counted them, and by the unmodified model's own router."""
    import deepspeed.comm as dist
    import torch
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(1, tiny_models.VOCABULARY, (2, 8), generator=generator)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    logits = plain(input_ids=ids, output_router_logits=True).router_logits[0]
    chosen = logits.topk(plain.config.num_experts_per_tok).indices
    with engine_of(checkpoint, ds_config(2, preset="qwen3_moe")) as engine:
        engine(input_ids=ids)
        layer = next(iter(autoep_layers(engine.module).values()))
        return layer.tokens_per_expert.int().tolist(), torch.bincount(chosen.flatten(), minlength=6).tolist()


def test_routing_counts_global_expert_ids(four_ranks, checkpoint):
    for counted, expected in four_ranks.run(counted_and_expected_tokens, checkpoint):
        assert counted == expected and len(counted) == tiny_models.EXPERTS


def recorded_router_logits(checkpoint):
    """Largest difference of the recorded router logits from the unmodified model's, and how many were recorded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import output_capturing

    ids = torch.arange(1, 17).reshape(2, 8)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    expected = plain(input_ids=ids, output_router_logits=True).router_logits
    registry = dict(output_capturing._CAN_RECORD_REGISTRY)
    with engine_of(checkpoint, ds_config(2, preset="qwen3_moe")) as engine:
        recorded = engine(input_ids=ids, output_router_logits=True).router_logits
    assert dict(output_capturing._CAN_RECORD_REGISTRY) == registry, "recorders of other models were changed"
    return len(recorded), max((a - b).abs().max().item() for a, b in zip(recorded, expected))


def test_router_logits_are_recorded_as_before_replacement(four_ranks, checkpoint):
    for count, difference in four_ranks.run(recorded_router_logits, checkpoint):
        assert count == 2 and difference < 1e-5
