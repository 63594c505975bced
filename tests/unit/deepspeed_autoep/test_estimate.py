# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0
"""``ds_autoep estimate``: figures by hand, what it prints and refuses, and what engines really hold."""
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from interpreters import fresh_environment
from tables import table_rows

import init_memory
import tiny_models
from deepspeed_autoep import cli
from deepspeed_autoep.estimate import Settings, allowed_ep_degrees, construct_transient, estimate, replace_transient
from deepspeed_autoep.model_sizes import EstimateError, ModelSizes, Parameter, read_model
from engines import ds_config
from ranks import rank_group
from training_memory import trained_memory

two_ranks = rank_group(2)
four_ranks = rank_group(4)

# Two layers of 4 experts, 30 x 10 each; a norm below the threshold and a router above it.
HAND_MADE = ModelSizes((
    Parameter("embed", 501, "embed"),
    Parameter("0.norm", 10, "layers.0"),
    Parameter("0.router", 41, "layers.0", router=True),
    Parameter("0.w1", 1200, "layers.0", experts=4),
    Parameter("1.norm", 10, "layers.1"),
    Parameter("1.router", 41, "layers.1", router=True),
    Parameter("1.w1", 1200, "layers.1", experts=4),
))
BUFFERS = dict(param_persistence_threshold=10, reduce_bucket_size=100, prefetch_bucket_size=50, max_reuse_distance=20,
               reshard_bucket_bytes=8)  # yapf: disable


def by_hand(ep, **settings):
    return asdict(estimate(HAND_MADE, Settings(**{"ranks": 4, **BUFFERS, **settings}), ep))


def test_zero_3_by_hand():
    partition = 126 + 2 * (3 + 11 + 300)  # 501, 10 and 41 over 4 ranks, padded; 600 over an EDP group of 2
    assert by_hand(2) == dict(ep=2,
                              weights=2 * (partition + 2 * (10 + 41)),
                              gradients=2 * partition,
                              optimizer=(4 + 4 + 4) * partition,
                              buffers=2 * 100,
                              gathered=2 * 600,
                              backward=2 * (3 * 600 + 100 + 50 + 10),
                              step=(2 + 4) * 600,
                              construct=2 * 501,
                              replace=2 * 300 + 8,
                              saved=2 * 1200,
                              host=0)  # yapf: disable


def test_an_expert_group_of_one_rank_gathers_nothing():
    found = by_hand(4)
    assert found["gathered"] == 2 * 501 and found["saved"] == 0
    assert found["backward"] == 2 * (2 * 501 + 100 + 50 + 10)


@pytest.mark.parametrize("dtype, optimizer, weight, state", [("fp32", "adamw", 4, 12), ("fp16", "sgd", 2, 4),
                                                             ("bf16", "lion", 2, 8)])
def test_bytes_of_an_element(dtype, optimizer, weight, state):
    found = by_hand(2, dtype=dtype, optimizer=optimizer)
    assert found["gradients"] == weight * 754 and found["optimizer"] == state * 754
    assert found["step"] == (4 if dtype == "fp32" else 6) * 600


def test_stages_below_3():
    local, partition = 501 + 2 * (51 + 600), 2 * (76 + 300)  # 603 dense, 1200 of experts: two elements a rank at least
    for zero, gradients, optimizer in ((0, local, local), (1, local, partition), (2, partition, partition)):
        found = by_hand(2, zero=zero)
        assert found["weights"] == 2 * local
        assert found["gradients"] == 2 * gradients and found["optimizer"] == 12 * optimizer, zero
        assert found["gathered"] == found["saved"] == 0
        assert found["construct"] == 2 * 1200 and found["replace"] == 2 * (1200 + 600)


def test_offloading_moves_bytes_to_the_host():
    plain, optimizer = by_hand(2), by_hand(2, offload="optimizer")
    both = by_hand(2, offload="optimizer+params")
    assert optimizer["gradients"] == optimizer["optimizer"] == optimizer["step"] == 0
    assert optimizer["host"] == plain["optimizer"] + plain["gradients"] + 4 * 754  # float32 gradients too
    assert both["weights"] == 2 * 102 and both["host"] == optimizer["host"] + 2 * 754


def test_degrees_divide_ranks_and_experts():
    assert allowed_ep_degrees(HAND_MADE, 12) == [1, 2, 4]
    with pytest.raises(EstimateError, match=r"--ep: found 3 with N=12 .* num_experts=4 in layers.0; allowed: 1, 2, 4"):
        estimate(HAND_MADE, Settings(12), 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            tiny_models.build(family, **SIZES[family]).save_pretrained(made[family])
        return made[family]

    return make


# Experts dominate. Those of qwen3_moe have odd sizes, so that partitions are padded.
SIZES = {
    "mixtral": dict(num_local_experts=8, intermediate_size=192, hidden_size=64),
    "qwen3_moe": dict(num_experts=6, moe_intermediate_size=37, hidden_size=51, experts_implementation="eager"),
    "deepseek_v3": dict(n_routed_experts=8, moe_intermediate_size=192, hidden_size=64, num_hidden_layers=3),
}
SMALL = dict(param_persistence_threshold=300, reduce_bucket_size=1000, prefetch_bucket_size=0, max_reuse_distance=0)
ZERO = {(key if key == "reduce_bucket_size" else f"stage3_{key}"): value for key, value in SMALL.items()}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("ranks, dtype", [(2, "fp32"), (4, "bf16"), pytest.param(2, "bf16", marks=pytest.mark.slow),
                                          pytest.param(4, "fp32", marks=pytest.mark.slow)])  # yapf: disable
def test_engines_hold_what_was_estimated(request, checkpoint, ranks, family, dtype):
    group = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    loop = family == "qwen3_moe"  # torch._grouped_mm takes no odd sizes
    config = ds_config(2, zero=ZERO, dtype=None if dtype == "fp32" else dtype, block={"use_grouped_mm": not loop},
                       preset=family)  # yapf: disable
    seen = group.run(trained_memory,
                     checkpoint(family),
                     config,
                     dtype={
                         "fp32": "float32",
                         "bf16": "bfloat16"
                     }[dtype],
                     experts_implementation="eager" if loop else "grouped_mm")
    expected = estimate(read_model(checkpoint(family)), Settings(ranks, dtype=dtype, **SMALL), 2)
    # torch's AdamW makes two temporary copies of what it steps; DeepSpeed's works in place.
    step = expected.step // (4 if dtype == "fp32" else 6) * 3 * 4
    for rank in seen:
        for part in ("weights", "gradients", "optimizer", "training"):
            assert rank[part] == pytest.approx(getattr(expected, part), rel=0.05), part
        assert rank["step"] == pytest.approx(step, rel=0.05)
        # An upper bound but for activations. A loop over experts makes further copies of their gradients.
        assert loop or rank["backward"] < 1.15 * expected.backward


@pytest.mark.parametrize("ep", [1, 4])
def test_setting_up_takes_what_was_estimated(four_ranks, tmp_path, ep):
    from transformers import Qwen3MoeConfig
    Qwen3MoeConfig(num_hidden_layers=2, **init_memory.SIZES).save_pretrained(tmp_path)
    model, settings = read_model(tmp_path), Settings(4, dtype="fp32", reshard_bucket_bytes=2**12)
    for seen in four_ranks.run(init_memory.measure, 2, ep, bucket_bytes=2**12):
        assert seen["replace"] == pytest.approx(replace_transient(model, settings, ep), rel=0.05)
        # The largest dense parameter; less if it comes before most of the weights are there.
        assert 0 < seen["construct"] <= construct_transient(model, settings, ep)


@pytest.fixture
def config(tmp_path):
    """A directory with the config.json of a tiny Mixtral, and nothing else."""
    values = dict(model_type="mixtral", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=6,
                  architectures=["MixtralForCausalLM"], quantization_config={"quant_method": "fp8"})  # yapf: disable
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_parameters_are_read_from_the_config_alone(config):
    model = read_model(config / "config.json")
    # Of a layer: attention 2 x 16 x 16 + 2 x 16 x 8, experts 6 x 3 x 16 x 24, the router, two norms; then embeddings.
    assert model.numel == 2 * (768 + 6912 + 96 + 32) + 2 * 32 * 16 + 16
    first = {p.name.removeprefix("model.layers.0."): p for p in model.parameters if p.layer == "model.layers.0"}
    assert {
        name: p.numel
        for name, p in first.items() if p.experts == 6
    } == {
        f"mlp.experts.{name}": 2304
        for name in ("gate_up_proj[0]", "gate_up_proj[1]", "down_proj")
    }
    assert [name for name, p in first.items() if p.router] == ["mlp.gate.weight"]


@pytest.mark.parametrize("model_type, biases, routers", [("gpt_oss", 3, 2), ("qwen2_moe", 0, 1)])
def test_biases_and_other_routers(tmp_path, model_type, biases, routers):
    values = dict(model_type=model_type, num_hidden_layers=1, vocab_size=32)
    (tmp_path / "config.json").write_text(json.dumps(values))
    parameters = read_model(tmp_path).parameters
    assert sum(p.name.split("[")[0].endswith("bias") for p in parameters if p.experts) == biases
    assert sum(p.router for p in parameters) == routers


def run(capsys, *arguments):
    code = cli.main(["estimate", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_table_has_a_row_for_each_degree(capsys, config):
    code, printed, _ = run(capsys, config, "--ranks", 4, "--memory", 80)
    assert code == 0
    assert [(row[0], row[-1]) for row in table_rows(printed)] == [("1", "yes"), ("2", "yes")]


def test_json_has_bytes(capsys, config):
    code, printed, _ = run(capsys, config, "--ranks", 4, "--ep", 2, "--json", "--dtype", "fp32", "--bucket", 64)
    answer = json.loads(printed)
    expected = estimate(read_model(config), Settings(4, dtype="fp32", reshard_bucket_bytes=64), 2)
    assert code == 0 and answer["dtype"] == "fp32" and answer["ranks"] == 4
    assert answer["estimates"] == [{**asdict(expected), "peak": expected.peak, "fits": None}]


def test_exit_status_when_nothing_fits(capsys, config):
    code, printed, _ = run(capsys, config, "--ranks", 4, "--memory", 0.5)  # the bucket of gradients alone takes more
    assert code == 1 and {row[-1] for row in table_rows(printed)} == {"no"}


@pytest.mark.parametrize("arguments, message", [
    (["--ep", "3"], "--ep: found 3 with N=4 ranks and num_experts=6 in model.layers.0; allowed: 1, 2"),
    (["--ep", "0"], "--ep: found 0 with N=4 ranks"),
    (["--zero", "2", "--offload", "optimizer+params"
      ], "--offload: found optimizer+params with --zero 2; allowed with this stage: none, optimizer"),
    (["--ranks", "0"], "--ranks: found 0; allowed: 1 or more"),
])
def test_impossible_questions(capsys, config, arguments, message):
    code, printed, error = run(capsys, config, "--ranks", 4, *arguments)
    assert code == 2 and not printed and message in error


@pytest.mark.parametrize("content, found", [
    (None, "found no file"),
    ("{", "which is not JSON"),
    ("[]", "without a model_type"),
    ('{"model_type": "abacus"}', "found model_type 'abacus'"),
    ('{"model_type": "mixtral", "hidden_size": "wide"}', "of which Transformers makes no mixtral model"),
    ('{"model_type": "llama", "num_hidden_layers": 1}', "found no MoE layer in LlamaForCausalLM"),
])
def test_what_is_no_model(capsys, tmp_path, content, found):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    code, printed, error = run(capsys, tmp_path, "--ranks", 4)
    assert code == 2 and not printed
    assert found in error and "allowed: " in error and str(tmp_path) in error


def test_other_commands_do_not_import_torch():
    code = "import sys; from deepspeed_autoep import cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=fresh_environment()).returncode == 0
