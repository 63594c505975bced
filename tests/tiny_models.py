# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face MoE models of the families that have a DeepSpeed preset."""
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 64
EXPERTS = 6  # not a power of two

# torch._grouped_mm takes rows of a multiple of 16 bytes only; ODD_SIZES are for the loop over experts.
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
              head_dim=8, intermediate_size=20, moe_intermediate_size=8, num_experts_per_tok=2,
              max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0)  # yapf: disable
_LATENT_ATTENTION = dict(kv_lora_rank=12, q_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                         num_key_value_heads=2, first_k_dense_replace=1, n_shared_experts=1)  # yapf: disable

# No number of ranks in the tests divides the elements of an expert parameter: 3 local experts x 7 x 25 at EP=2.
ODD_SIZES = dict(hidden_size=25, moe_intermediate_size=7)

# family -> (model type, what differs from _SIZES)
FAMILIES = {
    "mixtral": ("mixtral", dict(num_local_experts=EXPERTS, intermediate_size=8)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=EXPERTS, shared_expert_intermediate_size=9, decoder_sparse_step=1)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=EXPERTS, norm_topk_prob=True)),
    "qwen3_5_moe": ("qwen3_5_moe_text",
                    dict(num_experts=EXPERTS, shared_expert_intermediate_size=9,
                         layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
                         linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)),
    "deepseek_v2": ("deepseek_v2", dict(n_routed_experts=EXPERTS, topk_method="greedy", **_LATENT_ATTENTION)),
    "deepseek_v3": ("deepseek_v3",
                    dict(n_routed_experts=EXPERTS, n_group=2, topk_group=1, norm_topk_prob=True, **_LATENT_ATTENTION)),
    "minimax_m3": ("minimax_m3_vl_text",
                   dict(num_local_experts=EXPERTS, intermediate_size=8, dense_intermediate_size=20,
                        shared_intermediate_size=9, rotary_dim=8, index_head_dim=8, index_n_heads=1,
                        index_block_size=4, index_topk_blocks=2, mlp_layer_types=["dense", "sparse"])),
}  # yapf: disable


def build(family: str, seed: int = 0, experts_implementation: str = "grouped_mm", **overrides):
    """Return a float32 model of ``family`` in training mode, its weights random and large enough to route unevenly."""
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **own, **overrides})
    config._experts_implementation = experts_implementation
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.train()
