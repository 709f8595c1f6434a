"""Beam search against a naive one that knows no pages, requests or steps."""

import math
from functools import lru_cache

import numpy as np
import pytest
from dense_model import dense_logits
from fake_model import VOCABULARY, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import CheckedScheduler
from random_workloads import LIMITS
from tiny_llm import PROMPTS, greedy, write_tiny

import contbatch as cb
from contbatch.beam_search import BeamSearchParams, beam_search
from contbatch.errors import InvalidRequestError, LogitsError, RunnerError
from contbatch.model import load_model
from contbatch.policies.lockstep import Lockstep
from contbatch.runners.model_runner import ModelRunner


@lru_cache(None)
def smooth_logits(tokens):
    """Logits after `tokens`, no two of them alike."""
    return np.random.default_rng(np.array([len(tokens), *tokens])).standard_normal(VOCABULARY).astype(np.float32)


def naive(prompt, logits_of, width, max_tokens, penalty, ends):
    """Search by sorting all extensions of all beams; to the very end, whatever has been found."""
    beams, found = [((), 0.0)], []
    for place in range(max_tokens):
        extensions = []
        for tokens, total in beams:
            row = np.asarray(logits_of((*prompt, *tokens)), np.float64)
            row = row - row.max() - math.log(np.exp(row - row.max()).sum())
            extensions += [((*tokens, token), total + value) for token, value in enumerate(row.tolist())]
        extensions.sort(key=lambda extension: -extension[1])
        beams = []
        while extensions and len(beams) < width:
            tokens, total = extensions.pop(0)
            if tokens[-1] in ends or place == max_tokens - 1:
                found.append((tokens, total))
                beams += [] if tokens[-1] in ends else [(tokens, total)]
            else:
                beams.append((tokens, total))
    found.sort(key=lambda answer: -answer[1] / len(answer[0]) ** penalty)
    return found[:width]


class SmoothModel(FakeModel):
    logits_of = staticmethod(smooth_logits)


def scheduler_for(model, **limits):
    return CheckedScheduler(Lockstep(), num_pages=model.num_pages, page_size=model.page_size, **limits)


def same_answers(found, expected):
    assert [answer.token_ids for answer in found] == [tokens for tokens, _ in expected]
    for answer, (_, total) in zip(found, expected, strict=True):
        assert abs(answer.cumulative_logprob - total) < 1e-4


ENDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True)
QUESTIONS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7), min_size=1, max_size=3)


@settings(max_examples=120)
@given(
    questions=QUESTIONS,
    limits=LIMITS,
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 1.0, 1.0, 0.5, 2.0, -1.0]),
    ends=ENDS,
)
def test_the_answers_are_those_of_a_naive_search_however_tight_the_memory(
    questions, limits, width, max_tokens, penalty, ends
):
    limits = dict(limits)
    pages, size, host = limits.pop("num_pages"), limits.pop("page_size"), limits["num_host_pages"]
    pages = max(pages, *(-(-(len(q) + max_tokens) // size) for q in questions), 1)
    model = SmoothModel(pages, size, host)
    scheduler = scheduler_for(model, **limits)
    prompts = [cb.Request(i, question, eos_token_ids=ends) for i, question in enumerate(questions)]
    params = BeamSearchParams(width, max_tokens, penalty)
    results = beam_search(scheduler, ModelRunner(model), prompts, params)
    for question, result in zip(questions, results, strict=True):
        same_answers(result.hypotheses, naive(question, smooth_logits, width, max_tokens, penalty, ends))
    assert scheduler.pool.num_live == 0
    assert scheduler.swap_space.num_free == host


def search(prompt, params, model=None, ends=(), **limits):
    model = model or SmoothModel(64, 4)
    scheduler = scheduler_for(model, **limits)
    [result] = beam_search(scheduler, ModelRunner(model), [cb.Request("q", prompt, eos_token_ids=ends)], params)
    return result, scheduler


def test_the_prompt_is_computed_once_and_every_beam_one_token_a_step():
    steps = []

    class Counting(SmoothModel):
        def forward(self, inputs):
            steps.append(len(inputs["input_ids"]))
            return super().forward(inputs)

    search([1, 2, 3, 4, 5, 6], BeamSearchParams(3, 5), Counting(64, 4))
    assert steps == [6, 3, 3, 3, 3]


def test_beams_share_full_pages_and_dropped_ones_free_theirs():
    """11 prompt tokens fill 2 pages of 4; each of 4 beams has at most 2 pages more."""
    most = []

    class Watching(CheckedScheduler):
        def schedule(self, now=0.0):
            step = super().schedule(now)
            most.append(self.pool.num_live)
            for beams in self.running:
                assert beams.pages[:2] == self.running[0].pages[:2]
            return step

    model = SmoothModel(64, 4)
    scheduler = Watching(Lockstep(), num_pages=64, page_size=4)
    params = BeamSearchParams(4, 5)
    beam_search(scheduler, ModelRunner(model), [cb.Request(0, list(range(11)))], params)
    assert most[0] == 3
    assert max(most) <= 2 + 4 * 2
    assert scheduler.pool.num_live == 0


def test_a_search_ends_as_soon_as_nothing_better_can_come():
    """Token 3 is likely everywhere; an answer that ends at once is better than any longer one, without a penalty."""

    class Ending(FakeModel):
        logits_of = staticmethod(lambda tokens: np.where(np.arange(VOCABULARY) == 3, 9.0, -0.01 * np.arange(11)))

    model = Ending(64, 4)
    result, _ = search([1], BeamSearchParams(1, 20, 0.0), model, ends=[3])
    assert [answer.token_ids for answer in result.hypotheses] == [(3,)]
    assert model.calls == 1


def test_an_error_ends_one_search_alone():
    model = SmoothModel(64, 4, poison=[(1, 2)])
    scheduler = scheduler_for(model)
    prompts = [cb.Request(0, [1, 2]), cb.Request(1, [4, 5])]
    bad, good = beam_search(scheduler, ModelRunner(model), prompts, BeamSearchParams(2, 3))
    assert isinstance(bad.error, LogitsError)
    assert bad.hypotheses == ()
    same_answers(good.hypotheses, naive([4, 5], smooth_logits, 2, 3, 1.0, ()))


def test_a_crash_or_a_prompt_that_never_fits_leaves_nothing_behind():
    model = SmoothModel(4, 4, crash=[2])
    scheduler = scheduler_for(model)
    with pytest.raises(RuntimeError, match="crashed"):
        beam_search(scheduler, ModelRunner(model), [cb.Request(0, [1, 2])], BeamSearchParams(3, 6))
    prompts = [cb.Request(0, [1]), cb.Request(1, [1] * 20)]
    with pytest.raises(InvalidRequestError, match="can never run"):
        beam_search(scheduler, ModelRunner(model), prompts, BeamSearchParams(2, 3))
    with pytest.raises(InvalidRequestError, match="at most the vocabulary's 11"):
        beam_search(scheduler, ModelRunner(model), [cb.Request(0, [1])], BeamSearchParams(12, 3))
    assert not scheduler.has_requests
    assert scheduler.pool.num_live == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer ≥ 1, got 0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 11}, r"length_penalty must be in \[-10, 10\], got 11"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_parameters_are_checked(values, message):
    with pytest.raises(InvalidRequestError, match=message):
        BeamSearchParams(**values)


# ---- on a model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with cb.LLM(folder, num_pages=24, page_size=4, num_host_pages=8) as llm:
        yield llm
        assert llm.num_free_pages == 24


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_answers_of_a_model_are_those_of_a_naive_search_by_dense_forward_passes(llm, folder, width):
    model = load_model(folder)
    logits = lru_cache(None)(lambda tokens: dense_logits(model, np.array(tokens))[-1])
    ends = (llm.tokenizer.eos_token_id,)
    for penalty in (0.0, 1.0):
        outputs = llm.beam_search(PROMPTS, cb.BeamSearchParams(width, 5, penalty))
        for output in outputs:
            expected = naive(output.prompt_token_ids, logits, width, 5, penalty, ends)
            same_answers(output.choices, expected)
            assert output.text == llm.tokenizer.decode(output.token_ids)
            assert all(c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length") for c in output.choices)


def test_a_beam_of_one_is_greedy(llm):
    beams = llm.beam_search(PROMPTS, cb.BeamSearchParams(1, 9, ignore_eos=True))
    assert [o.token_ids for o in beams] == [o.token_ids for o in llm.generate(PROMPTS, greedy(9), progress=False)]


def test_a_search_needs_all_pages_and_gives_them_back(llm):
    stream = llm.stream(PROMPTS[0], greedy(9))
    with pytest.raises(RunnerError, match="beam_search\\(\\) needs all pages"):
        llm.beam_search(PROMPTS[0], cb.BeamSearchParams(2, 3))
    stream.close()
    [output] = llm.beam_search(PROMPTS[0], cb.BeamSearchParams(2, 3))
    assert len(output.choices) == 2
    assert output.choices[0].cumulative_logprob >= output.choices[1].cumulative_logprob
