"""What is observed while a model reads texts and writes on."""

import numpy as np
import pytest
from dense_model import attention, dense_logits, rms_norm
from hypothesis import given
from hypothesis import strategies as st
from quantised import MODELS, TOKENS
from tiny_llm import write_tiny

from contbatch.calibrate import BEGINNINGS, MAX_READ, _drawn, _groups, calibrate, calibration_prompts, paragraphs
from contbatch.errors import InvalidRequestError
from contbatch.export import export_onnx
from contbatch.fit import SAMPLE
from contbatch.model import random_model
from contbatch.observed import FOLDS, Observed, Observer
from contbatch.quantize import linear_inputs
from contbatch.tokenizer import load_tokenizer


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request, tmp_path_factory):
    """A model and its float32 export."""
    model = random_model(3, **MODELS[request.param])
    return model, export_onnx(model, tmp_path_factory.mktemp("floats") / "model.onnx")


def sums(model, prompt):
    """Each layer's input with attention's output added, then with the MLP's, in float64."""
    config, weights, found = model.config, {n: w.astype(float) for n, w in model.weights.items()}, {}
    x = weights["embed"][prompt]
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + attention(rms_norm(x, layer["attn_norm"], config.rms_norm_eps), layer, config)
        found[f"{prefix}attention"] = x
        y = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        gate = y @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T
        found[f"{prefix}gated"] = x
    return found


def test_calibration_sees_what_the_layers_take(exported):
    model, path = exported
    prompts = [TOKENS[0], TOKENS[1], TOKENS[2], TOKENS[3][:3], TOKENS[4]]
    rows = [slice(0, 40), slice(40, 80), slice(80, 120), slice(120, 123), slice(123, 163)]
    seen = calibrate(path, prompts)
    assert list(seen) == [value.name for value in linear_inputs(model.config)]
    head = model.weights["embed" if model.config.tie_word_embeddings else "lm_head"]
    wanted = np.concatenate([dense_logits(model, prompt) for prompt in prompts])
    assert np.allclose(seen["final_norm"].sample @ head.T, wanted, atol=1e-3)
    for value in linear_inputs(model.config):
        found = seen[value.name]
        assert np.array_equal(found.fold, [0] * 80 + [1] * 43 + [2] * 40)
        for i in range(FOLDS):
            largest = np.abs(found.sample[found.fold == i]).max(axis=0, initial=0)
            assert np.array_equal(found.largest[i], largest)
        assert (found.sizes is None) == (not value.added_to)
    for prompt, part in zip(prompts, rows, strict=True):
        for name, sum_ in sums(model, prompt).items():
            assert np.allclose(seen[name].sizes[part], (sum_**2).sum(axis=1), rtol=1e-3), name


def test_largest_of_others():
    rows = np.array([[1, -2], [3, 1], [-5, 0], [2, 2], [4, 1]], np.float32)
    assert Observed.of(rows).largest_of_others().tolist() == [[5, 2], [5, 2], [4, 2], [5, 2]]


def test_prompts_that_are_missing_or_empty(exported):
    for prompts in ([], [TOKENS[0], []]):
        with pytest.raises(InvalidRequestError, match="length of the shortest prompt must be at least 1, got 0"):
            calibrate(exported[1], prompts)


def test_a_model_writes_on_until_its_positions_end(exported):
    model, path = exported
    prompts = [TOKENS[0][:5], TOKENS[1], TOKENS[2], TOKENS[3][:4]]
    read, more, again = (calibrate(path, prompts, n)["final_norm"].sample for n in (0, 6, 6))
    assert len(more) == len(read) + 4 * 6
    assert np.array_equal(more, again)
    assert np.allclose(more[:89], read, atol=1e-5)
    head = model.weights["embed" if model.config.tie_word_embeddings else "lm_head"]
    written = list(prompts[3])
    for row in more[92:101:4] @ head.T:  # after the fourth prompt; only the rows tell which tokens these are
        off = [np.abs(dense_logits(model, [*written, token])[-1] - row).max() for token in range(256)]
        assert sorted(off)[0] < 1e-3 < 0.1 * sorted(off)[1]
        written.append(int(np.argmin(off)))
    long = [(TOKENS[0] * 20)[: model.config.max_position - 2], TOKENS[1], TOKENS[2], TOKENS[3]]
    seen = calibrate(path, long, 6)["final_norm"]
    assert len(seen.sample) == len(np.arange(510 + 3 * 40 + 4 * 2)[:: max(1, (510 + 3 * 40 + 4 * 2) // SAMPLE)])


@given(st.lists(st.integers(1, 2 * MAX_READ), min_size=1, max_size=20))
def test_prompts_are_read_together_while_there_is_room(lengths):
    groups = list(_groups(np.array(lengths, np.int32)))
    assert [length for group in groups for length in lengths[group]] == lengths
    for group, after in zip(groups, [*groups[1:], None], strict=True):
        assert sum(lengths[group]) <= MAX_READ or len(lengths[group]) == 1
        assert after is None or sum(lengths[group]) + lengths[after.start] > MAX_READ, "else one more had fitted"


def test_bfloat16_sees_nearly_the_same(exported):
    """Rounded to 8 bits of mantissa; in float32 all of it is compared above."""
    exact, near = (calibrate(exported[1], TOKENS[:8], precision=kind) for kind in ("f32", "bf16"))
    for name, seen in exact.items():
        error = np.square(near[name].sample - seen.sample).mean() / np.square(seen.sample).mean()
        assert error < 0.03**2, name


def test_tokens_are_drawn_as_likely_as_the_logits_say():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05, 1e-30], np.float32)) + np.float32(7)
    counts = np.bincount(_drawn(np.tile(logits, (40000, 1)), np.random.default_rng(0)), minlength=5)
    assert np.allclose(counts / 40000, [0.5, 0.3, 0.15, 0.05, 0], atol=0.01)


@given(
    st.lists(st.lists(st.integers(0, FOLDS - 1), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 12)
)
def test_pieces_are_gathered_as_one(pieces, stride):
    fold = np.array([x for piece in pieces for x in piece])
    rows = np.random.default_rng(0).normal(size=(len(fold), 3)).astype(np.float32)
    observer, start = Observer(stride), 0
    for piece in pieces:
        part = slice(start, start := start + len(piece))
        observer.add(rows[part], fold[part], rows[part] * 2)
    found = observer.observed()
    assert np.array_equal(found.sample, rows[::stride])
    assert np.array_equal(found.fold, fold[::stride])
    assert np.allclose(found.sizes, 4 * (rows[::stride] ** 2).sum(axis=1))
    for i in range(FOLDS):
        assert np.array_equal(found.largest[i], np.abs(rows[fold == i]).max(axis=0, initial=0))


def test_texts_are_two_and_have_many_kinds_of_paragraphs(tmp_path):
    tokenizer = load_tokenizer(write_tiny(tmp_path))
    texts = {name: paragraphs(name, tokenizer) for name in ("calibration", "held_out")}
    assert all(len(found) >= 15 for found in texts.values())
    assert not {tuple(p) for p in texts["calibration"]} & {tuple(p) for p in texts["held_out"]}
    with_first = calibration_prompts(tokenizer, 1)
    assert [p[0] == 1 for p in with_first] == [i % 2 == 0 for i in range(len(with_first))]
    found = [prompt[first:] for prompt, first in zip(with_first, [1, 0] * len(with_first), strict=False)]
    assert found == [p[:length] for length in (None, *BEGINNINGS) for p in texts["calibration"]]
