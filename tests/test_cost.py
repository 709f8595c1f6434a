"""Cost models against arithmetic done by hand, from the figures of data sheets and papers."""

import math
import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.cost import Linear, seconds_by_context
from contbatch.errors import CostModelError
from contbatch.hardware import HARDWARE, Hardware, hardware
from contbatch.model import ModelConfig, random_model, weight_shapes
from contbatch.model_shape import MODELS, ModelShape, model_shape
from contbatch.roofline import Roofline
from contbatch.step import Grant
from contbatch.step_shape import StepShape

IDEAL = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "link_efficiency": 1.0}
IDEAL |= {"step_overhead_s": 0.0, "all_reduce_latency_s": 0.0}
GRANTS = st.lists(st.builds(Grant, st.none(), st.integers(0, 5000), st.integers(1, 600), st.booleans(), st.just(False)))


def decodes(n, context):
    return StepShape(n, n, n, n * context, 0, 0)


def prefill(n, start=0):
    return StepShape.of([Grant(None, start, n, True, False)])


# ---- the shape of a step -----------------------------------------------------------------------------------------


@given(GRANTS)
def test_a_shape_counts_every_query_and_every_position(grants):
    shape = StepShape.of(grants)
    single, several = [g for g in grants if g.num_tokens == 1], [g for g in grants if g.num_tokens > 1]
    assert shape.num_tokens == sum(g.num_tokens for g in grants)
    assert shape.num_seqs == len(grants)
    assert shape.num_logits == sum(g.samples for g in grants)
    assert shape.decode_context == sum(len(range(g.start + 1)) for g in single)
    assert shape.prefill_context == sum(g.start + g.num_tokens for g in several)
    # One query at position p sees p + 1 positions, itself among them.
    assert shape.prefill_pairs == sum(p + 1 for g in several for p in range(g.start, g.start + g.num_tokens))


# ---- models ------------------------------------------------------------------------------------------------------

# As published with the weights (safetensors metadata on the Hugging Face hub), tied weights counted once.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "yi-34b": 34_388_917_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    assert MODELS[name].num_params == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"), [("opt-13b", 12.9), ("opt-30b", 30.0), ("opt-175b", 175), ("gpt-3-175b", 175)]
)
def test_parameters_are_as_many_as_the_papers_say(name, billions):
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"qk_norm": True}, {"tie_word_embeddings": True}])
def test_a_loaded_model_counts_the_weights_it_has(changes):
    config = random_model(**changes).config
    assert isinstance(config, ModelConfig)
    assert model_shape(config).num_params == sum(math.prod(shape) for shape in weight_shapes(config).values())


def test_a_token_of_opt_13b_leaves_800_kib():
    assert MODELS["opt-13b"].kv_bytes_per_token() == 800 * 1024, "vLLM, SOSP 2023, section 3"


def test_every_figure_has_a_source():
    assert all(entry.source for entry in [*HARDWARE.values(), *MODELS.values()])


# ---- roofline ----------------------------------------------------------------------------------------------------


def test_one_decode_of_opt_13b_reads_its_weights_once():
    cost = Roofline("A100-40GB", "opt-13b", **IDEAL)
    # 40 layers of 4·5120² + 8·5120² weights and 50272·5120 of the last layer, 2 bytes each, at 1555 GB/s.
    read = 2 * (40 * 12 * 5120**2 + 50272 * 5120) / 1555e9
    context = 1000 * 800 * 1024 / 1555e9
    assert cost.seconds(decodes(1, 1000)) == pytest.approx(read + context, rel=1e-12)
    assert cost.seconds(decodes(1, 0)) == pytest.approx(26e9 / 1.555e12, rel=0.03), "26 GB in a round figure"


def test_a_long_prompt_is_bound_by_arithmetic():
    cost = Roofline("A100-40GB", "opt-13b", **IDEAL)
    n = 2048
    linear = 2 * n * 40 * 12 * 5120**2
    attention = 4 * 40 * 5120 * sum(range(1, n + 1))
    head = 2 * 50272 * 5120 / 1555e9  # one row: bound by reading its weights
    assert cost.seconds(prefill(n)) == pytest.approx((linear + attention) / 312e12 + head, rel=1e-12)


def test_a_chunk_costs_what_it_adds():
    cost = Roofline("A100-80GB", "llama-2-7b", **IDEAL)
    attention = cost.seconds(prefill(512, 512)) - cost.seconds(prefill(512, 0))
    assert attention == pytest.approx(4 * 32 * 4096 * 512 * 512 / 312e12, rel=1e-9)


def test_a_short_chunk_behind_a_long_context_is_bound_by_reading_that():
    cost = Roofline("A100-40GB", "opt-13b", **IDEAL)
    for start in (4000, 8000):
        attention = cost.seconds(prefill(2, start)) - cost.seconds(
            prefill(2)._replace(prefill_context=0, prefill_pairs=0)
        )
        # Keys and values of both tokens and all before them, once: 800 KiB each. Arithmetic takes a hundredth of it.
        assert attention == pytest.approx((start + 2) * 800 * 1024 / 1555e9, rel=1e-9)
        assert 4 * 40 * 5120 * (2 * start + 3) / 312e12 < attention / 90


def test_rows_without_logits_do_not_touch_the_last_layer():
    cost = Roofline("A100-80GB", "llama-2-7b", **IDEAL)
    shape = prefill(512)
    head = cost.seconds(shape) - cost.seconds(shape._replace(num_logits=0))
    assert head == pytest.approx(2 * 32000 * 4096 / 2039e9, rel=1e-9)


def test_tensor_parallelism_splits_weights_and_adds_two_all_reduces_a_layer():
    one, four = (Roofline("H100", "llama-3-70b", "f8", t, **IDEAL) for t in (1, 4))
    shape, n = decodes(8, 0), 8
    reduce = 2 * 80 * (2 * 3 / 4) * n * 8192 * 2 / 450e9
    assert four.seconds(shape) == pytest.approx(one.seconds(shape) / 4 + reduce, rel=1e-12)
    slow = four.replace(all_reduce_latency_s=1e-5)
    assert slow.seconds(shape) - four.seconds(shape) == pytest.approx(160e-5, rel=1e-9)


def test_kv_heads_are_copied_when_there_are_fewer_than_devices():
    per_token = [Roofline("H100", "llama-3-8b", "f16", t).kv_bytes_per_token for t in (1, 8, 16)]
    assert per_token == [131072, 16384, 16384]


def test_overheads_and_efficiencies_act_as_they_say():
    ideal = Roofline("A100-80GB", "llama-2-7b", **IDEAL)
    shape = decodes(16, 700)
    assert ideal.replace(step_overhead_s=0.002).seconds(shape) == pytest.approx(ideal.seconds(shape) + 0.002)
    assert ideal.replace(memory_efficiency=0.5).seconds(shape) == pytest.approx(2 * ideal.seconds(shape))
    assert ideal.replace(compute_efficiency=0.5).seconds(shape) == ideal.seconds(shape), "decodes are bound by memory"
    long = prefill(4096)._replace(num_logits=0)
    assert ideal.replace(compute_efficiency=0.5).seconds(long) == pytest.approx(2 * ideal.seconds(long))


SHAPES = GRANTS.map(StepShape.of)


@given(SHAPES, st.sampled_from(StepShape._fields), st.integers(1, 1000), st.sampled_from([1, 4]))
def test_more_work_never_takes_less_time(shape, field, more, split):
    cost = Roofline("L4", "llama-2-13b", "f16", split)
    bigger = shape._replace(**{field: getattr(shape, field) + more})
    assert cost.seconds(bigger) >= cost.seconds(shape) >= 0


@given(SHAPES, st.lists(st.integers(0, 10**7), min_size=1, max_size=5))
def test_seconds_by_context_have_the_same_bits(shape, contexts):
    class Mine(Roofline):
        def seconds(self, shape):
            return 2 * super().seconds(shape)

    linear = Linear(step_s=0.1, token_s=0.3, seq_s=0.7, logits_s=0.01, decode_context_s=1e-3, prefill_pair_s=1e-5)
    split = Roofline("H100", "opt-13b", tensor_parallel=2)
    for cost in (Roofline("L4", "llama-2-13b"), split, linear, Mine("L4", "opt-13b")):
        seconds = seconds_by_context(cost, shape)
        assert list(seconds(contexts)) == [cost.seconds(shape._replace(decode_context=each)) for each in contexts]


def test_an_empty_step_takes_no_time():
    assert Roofline("L4", "llama-2-13b").seconds(StepShape.of([])) == 0


def test_opt_13b_on_an_a100_holds_what_the_vllm_paper_says():
    tokens = Roofline("A100-40GB", "opt-13b").kv_capacity()
    assert tokens == (int(40 * 2**30 * 0.9) - 2 * 12_853_473_280) // (800 * 1024)
    # The paper: 12 GB, 15,728 slots, so 7 requests of 2,048 tokens reserved ahead. Computed from first principles here.
    assert tokens == pytest.approx(15_728, rel=0.01)
    assert tokens // 2048 == 7


def test_swapped_pages_are_priced_by_the_link_to_the_host():
    cost = Roofline("A100-40GB", "opt-13b", **IDEAL)
    assert cost.swap_seconds(10, 16) == pytest.approx(10 * 16 * 800 * 1024 / 32e9)
    assert cost.swap_seconds(0, 16) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "A100"}, "gpu must be .*A100-40GB.* got 'A100'"),
        ({"model": "opt-14b"}, "model must be .*opt-13b.* got 'opt-14b'"),
        ({"dtype": "f8"}, "dtype on A100-40GB must be one of .*bf16.* got 'f8'"),
        ({"tensor_parallel": 0}, "tensor_parallel must be an integer ≥ 1, got 0"),
        ({"tensor_parallel": 3}, "tensor_parallel must be one that splits 40 heads .* got 3"),
        ({"compute_efficiency": 1.5}, "compute_efficiency must be in .0, 1., got 1.5"),
        ({"memory_efficiency": 0}, "memory_efficiency must be in .0, 1., got 0"),
        ({"step_overhead_s": -1}, "step_overhead_s must be finite seconds ≥ 0, got -1"),
        ({"overhead": 1}, "the field to replace must be one of gpu.* got 'overhead'"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(CostModelError, match=message):
        Roofline("A100-40GB", "opt-13b").replace(**changes)


def test_weights_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(CostModelError, match=r"59.9 GB of weights .* 1 device.* 38.7 GB, 90% of A100-40GB"):
        Roofline("A100-40GB", "opt-30b").kv_capacity()


@pytest.mark.parametrize(
    "changes",
    [{"peak_flops": {"f64": 1e12}}, {"peak_flops": {"f16": 0}}, {"memory_bytes": 0.5}, {"host_bytes_per_s": math.inf}],
)
def test_bad_hardware_is_refused(changes):
    given_ = {
        "name": "x",
        "peak_flops": {"f16": 1e12},
        "memory_bytes_per_s": 1e9,
        "memory_bytes": 1,
        "source": "made up",
    }
    given_ |= {"peer_bytes_per_s": 1e9, "host_bytes_per_s": 1e9}
    assert hardware(Hardware(**given_)).name == "x"
    with pytest.raises(CostModelError):
        Hardware(**{**given_, **changes})


def test_bad_models_are_refused():
    with pytest.raises(CostModelError, match="num_heads must be a multiple of kv_num_heads = 3, got 4"):
        ModelShape(10, 10, 10, 1, 4, 3, 8, 100)
    with pytest.raises(CostModelError, match="num_layers must be an integer ≥ 1, got 0"):
        ModelShape(10, 10, 10, 0, 4, 2, 8, 100)


# ---- linear ------------------------------------------------------------------------------------------------------


class Words(Linear):
    """A cost model of one's own, one of whose answers is no number."""

    def __init__(self, **wrong):
        super().__init__(step_s=0.1)
        object.__setattr__(self, "wrong", wrong)

    def __repr__(self):
        return "Words()"

    def seconds(self, shape):
        wrong = "decode" if shape.decode_context else "prefill"
        return self.wrong.get(wrong, super().seconds(shape))

    def swap_seconds(self, num_pages, page_size):
        return self.wrong.get("swap", 0.0)


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefill": "1 s"}, "seconds of the cost model Words() must be a number of seconds, got '1 s'"),
        ({"decode": None}, "seconds of the cost model Words() must be a number of seconds, got None"),
        ({"decode": 1j}, "seconds of the cost model Words() must be a number of seconds, got 1j"),
        ({"swap": [1]}, "swap_seconds of the cost model Words() must be a number of seconds, got [1]"),
        ({"resize_s": "1"}, "resize_s of the cost model Words() must be a number of seconds, got '1'"),
    ],
)
def test_a_cost_model_of_ones_own_that_says_no_number_is_named(wrong, message, fast_forward):
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=4, prompt=8, output=20)
    cost = Words(**wrong)
    if "resize_s" in wrong:
        object.__setattr__(cost, "resize_s", wrong["resize_s"])
    backend = cb.Simulated(cost=cost, kv_tokens=64)
    with pytest.raises(CostModelError, match=re.escape(message)):
        cb.simulate(load, backend=backend, page_size=4, num_host_pages=20, fast_forward=fast_forward)


def test_a_cost_model_may_say_numbers_of_numpy():
    load = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=1, prompt=8, output=4)
    for number in (1, np.float32(0.25), np.int64(2)):
        backend = cb.Simulated(cost=Words(prefill=number), kv_tokens=64)
        assert cb.simulate(load, backend=backend).duration_s == pytest.approx(number + 3 * 0.1)


def test_linear_is_a_sum_of_its_terms():
    cost = Linear(
        step_s=1, token_s=10, seq_s=100, logits_s=1000, decode_context_s=1e4, prefill_pair_s=1e5, swapped_token_s=2
    )
    assert cost.seconds(StepShape(2, 3, 4, 5, 6, 7)) == 1 + 20 + 300 + 4000 + 5e4 + 7e5
    assert cost.swap_seconds(3, 16) == 96


def test_every_coefficient_is_checked():
    rows = {"few_rows": "an integer ≥ 0", "min_rows": "an integer ≥ 1"}
    for name in (field.name for field in fields(Linear)):
        with pytest.raises(CostModelError, match=f"{name} must be {rows.get(name, 'finite seconds ≥ 0')}, got -1"):
            Linear(**{name: -1})


def test_rows_are_cheap_up_to_a_number_of_them():
    cost = Linear(step_s=1, token_s=10, few_rows=4, many_rows_s=100)
    prices = [cost.seconds(StepShape(n, 1, 1, 0, 0, 0)) for n in (1, 4, 5, 6)]
    assert prices == [1, 1, 1 + 100 + 10, 1 + 100 + 20]


def test_positions_that_others_read_too_come_from_the_cache():
    cost = Linear(decode_context_s=2, cold_context_s=3)
    assert cost.seconds(StepShape(2, 2, 2, 50, 0, 0)) == 250
    assert cost.seconds(StepShape(2, 2, 2, 50, 0, 0, shared_context=20)) == 190


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1"])
def test_coefficients_are_seconds(value):
    with pytest.raises(CostModelError, match="token_s must be finite seconds ≥ 0"):
        Linear(token_s=value)
