"""Logits of a request, bit by bit: alone, in any batch, in chunks, preempted, with cached pages, at any page size."""

from collections import Counter

import gguf
import numpy as np
import pytest
from gguf_writer import gguf_metadata, gguf_tensors, write_gguf
from ragged import step

import contbatch as cb
from contbatch.calibrate import calibrate
from contbatch.export import export_onnx
from contbatch.inputs import pack
from contbatch.model import load_model, random_model
from contbatch.quantize import Quantized
from contbatch.runners.cpu import CPUModel
from contbatch.runners.model_runner import ModelRunner

SIZES = {"hidden_size": 288, "intermediate_size": 352, "num_heads": 9, "kv_num_heads": 3, "head_size": 32}
VOCABULARY, SLOTS = 512, 6000
PRECISION = {"float32": "f32", "packed": "f32", "w8a8": "w8a8"}
PAGE_SIZES = 1, 3, 16, 64


def make(kind, folder):
    model = random_model(1, vocab_size=VOCABULARY, tie_word_embeddings=True, **SIZES)
    path = folder / "m.onnx"
    if kind == "packed":  # as in the default model's file
        tensors = gguf_tensors(model)
        types = {name: gguf.GGMLQuantizationType.Q4_1 for name, array in tensors.items() if array.ndim == 2}
        types["token_embd.weight"] = gguf.GGMLQuantizationType.Q8_0
        gguf_path = write_gguf(folder / "m.gguf", "llama", gguf_metadata(model.config), tensors, types)
        return export_onnx(load_model(gguf_path), path)
    if kind == "w8a8":
        floats = export_onnx(model, folder / "floats.onnx")
        text = np.random.default_rng(5).integers(0, VOCABULARY, (4, 50))
        quantized = Quantized.of(model, calibrate(floats, text), keep=["layers.0.gated"])
        assert len(quantized.steps) > 5
        return export_onnx(quantized.model, path, steps=quantized.steps)
    return export_onnx(model, path)


class Watching(ModelRunner):
    """Keeps the bits of all logits by request and position; a position computed twice must have the same."""

    def __init__(self, model):
        super().__init__(model)
        self.seen, self.rows, self.largest = {}, Counter(), 0
        forward = model.forward

        def watched(inputs):
            self.logits = forward(inputs).copy()
            return self.logits.copy()

        model.forward = watched

    def execute(self, scheduled):
        result = super().execute(scheduled)
        inputs = pack(scheduled)
        whose = [(request.request_id, position) for request, positions in inputs.scored for position in positions]
        whose += [(request.request_id, request.num_tokens - 1) for request in inputs.sampled]
        assert len(whose) == len(self.logits)
        for key, row in zip(whose, self.logits, strict=True):
            assert self.seen.setdefault(key, row.tobytes()) == row.tobytes()
        self.rows[len(inputs.input_ids)] += 1
        self.largest = max(self.largest, len(scheduled.grants))
        return result

    def close(self):
        del self.model.forward


def pool():
    """64 requests; some prompts begin alike, some answers are drawn, some prompts are scored."""
    rng = np.random.default_rng(7)
    beginnings = [rng.integers(0, VOCABULARY, n).tolist() for n in (0, 5, 24)]
    made = []
    for i in range(64):
        prompt = beginnings[i % 3] + rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist()
        heat = {"temperature": 0.8, "seed": i} if i % 4 == 0 else {}
        scores = {"prompt_logprobs": 1} if i % 5 == 0 else {}
        made.append((prompt, cb.SamplingParams(max_tokens=int(rng.integers(4, 16)), **heat, **scores)))
    return made


POOL = pool()


def serve(model, chosen, policy, **limits):
    """Bits of the logits by request and position, tokens by request, and what happened."""
    requests = [cb.Request(i, *POOL[i]) for i in chosen]
    runner = Watching(model)
    result = cb.Engine(cb.Scheduler(policy, **limits), runner).run(requests)
    runner.close()
    assert all(r.finish_reason == "length" for r in requests)
    assert result.requests.cached_tokens.sum() == 0 or limits["prefix_cache"]
    return runner, {r.request_id: r.output_token_ids for r in requests}, result.requests


class Models:
    """A model in pages of several sizes, and each request of the pool alone."""

    def __init__(self, kind, folder):
        path = make(kind, folder)
        self.by_page = {size: CPUModel(path, SLOTS // size, size, precision=PRECISION[kind]) for size in PAGE_SIZES}
        self.logits, self.tokens = {}, {}
        for i in range(len(POOL)):
            limits = {"num_pages": SLOTS // 16, "prefix_cache": False}
            runner, tokens, _ = serve(self.by_page[16], [i], cb.OneAtATime(), **limits)
            self.logits |= runner.seen
            self.tokens |= tokens


@pytest.fixture(scope="module", params=PRECISION)
def models(request, tmp_path_factory):
    return Models(request.param, tmp_path_factory.mktemp(request.param))


def mix(seed):
    """Who is served together, by which policy, and within which limits."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice(PAGE_SIZES))
    policy = (cb.ChunkedPrefill(), cb.MaxUtilization(), cb.ContinuousBatching(), cb.ChunkedPrefill())[seed % 4]
    budget = int(rng.choice([8, 33, 64, 300])) if policy == cb.ChunkedPrefill() else 2048
    slots = (90, 160, SLOTS)[seed % 3]
    chosen = rng.permutation(len(POOL))[: (7, 2, 16, 33, 64)[seed % 5]].tolist()
    limits = {"max_num_batched_tokens": budget, "num_pages": max(2, slots // page_size), "page_size": page_size}
    return chosen, policy, limits | {"prefix_cache": bool(rng.integers(2))}


def check(models, seed):
    """Serve a mix; who was in it has the bits and tokens it has alone. Return what happened."""
    chosen, policy, limits = mix(seed)
    runner, tokens, table = serve(models.by_page[limits["page_size"]], chosen, policy, **limits)
    assert tokens == {i: models.tokens[i] for i in chosen}
    for key, bits in runner.seen.items():
        assert bits == models.logits[key], (seed, key, limits)
    assert runner.seen.keys() == {key for key in models.logits if key[0] in chosen}
    chunked = len(runner.rows) > 1 and max(runner.rows) == limits["max_num_batched_tokens"]
    return {
        "preempted": int(table.preemptions.sum()),
        "cached": int(table.cached_tokens.sum()),
        "chunked": int(chunked),
        "single rows": runner.rows[1],
        "largest": int(runner.largest == 64),
    }


def test_a_request_has_the_same_bits_in_any_company(models):
    happened = Counter()
    for seed in range(15):
        happened.update(check(models, seed))
    assert happened["preempted"] > 9, happened
    assert happened["cached"] > 200
    assert min(happened["chunked"], happened["single rows"], happened["largest"]) > 0


def test_one_bit_that_hangs_on_the_company_is_found(models, monkeypatch):
    """Were it not, the test above would say nothing: whoever sits last among 9 to 40 tokens gets another last bit."""

    def forward(model, inputs):
        logits = original(model, inputs)
        if 8 < len(inputs["input_ids"]) <= 40 and len(logits):
            logits[-1, :1] = np.nextafter(logits[-1, :1], np.float32(np.inf))
        return logits

    original = CPUModel.forward
    monkeypatch.setattr(CPUModel, "forward", forward)
    with pytest.raises(AssertionError):
        check(models, 2)


def test_rows_of_a_step_do_not_see_how_many_there_are(models):
    """Each token is a sequence of its own, anywhere in a step; of some steps one row of logits is wanted."""
    model, rng = models.by_page[1], np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, 512)

    def forward(rows, wanted):
        sequences = [([ids[row]], 0) for row in rows]
        return model.forward(step(*sequences, table=np.arange(len(rows))[:, None], logits=wanted)).copy()

    expected = forward(np.arange(512), np.arange(512))
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257, 512):
        rows = rng.permutation(512)[:size]
        for wanted in (np.arange(size), rng.integers(0, size, 1), rng.integers(0, size, 5)):
            assert forward(rows, wanted).tobytes() == expected[rows[wanted]].tobytes(), (size, len(wanted))
