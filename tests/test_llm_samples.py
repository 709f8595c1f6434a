"""Several answers, swap and their outputs through the facade."""

import pytest
from tiny_llm import PROMPTS, greedy, write_tiny

import contbatch as cb
from contbatch.errors import InvalidRequestError

WARM = cb.SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[("f32", None), ("bf16", None), ("f32", "int8")])
def llm(folder, request):
    precision, kv_dtype = request.param
    with cb.LLM(folder, num_pages=40, page_size=4, num_host_pages=40, precision=precision, kv_dtype=kv_dtype) as llm:
        yield llm
        assert llm.num_free_pages == 40


def answers(llm, requests):
    return [[c.token_ids for c in llm.output(r).choices] for r in requests]


def test_samples_have_streams_of_their_own_that_depend_on_nothing_else(llm):
    outputs = llm.generate(PROMPTS, WARM.replace(n=4), progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [len(c.token_ids) for c in output.choices] == [9] * 4
        assert len({c.token_ids for c in output.choices}) == 4
        assert output.choices[0].token_ids == output.token_ids
        [alone] = llm.generate([prompt], WARM, progress=False)
        assert alone.token_ids == output.token_ids, "the first sample is the answer without the others"
        [fewer] = llm.generate([prompt], WARM.replace(n=2), progress=False)
        assert [c.token_ids for c in fewer.choices] == [c.token_ids for c in output.choices[:2]]
    unseeded = llm.generate(PROMPTS[0], WARM.replace(n=3, seed=None), progress=False)[0]
    assert len({c.token_ids for c in unseeded.choices}) == 3


def test_every_choice_has_its_text_reason_and_prompt(llm):
    [output] = llm.generate(PROMPTS[0], WARM.replace(n=3, logprobs=1, prompt_logprobs=0), progress=False)
    for choice in output.choices:
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert (choice.finish_reason, choice.request_id) == ("length", output.request_id)
        assert choice.prompt_logprobs == output.prompt_logprobs
        total = sum(scores[token].logprob for scores, token in zip(choice.logprobs, choice.token_ids, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)
    [single] = llm.generate(PROMPTS[0], WARM, progress=False)
    assert (single.choices, single.cumulative_logprob) == ((single,), None)


def test_best_of_gives_the_likeliest_of_the_samples(llm):
    [all_of_them] = llm.generate(PROMPTS[0], WARM.replace(n=6, logprobs=0), progress=False)
    [best] = llm.generate(PROMPTS[0], WARM.replace(n=2, best_of=6), progress=False)
    ranked = sorted(all_of_them.choices, key=lambda c: -c.cumulative_logprob)
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in ranked[:2]]
    assert best.text == ranked[0].text


def test_a_stop_string_ends_one_sample(llm):
    [whole] = llm.generate(PROMPTS[1], WARM.replace(n=3), progress=False)
    stop = whole.choices[1].text[2:4]
    [cut] = llm.generate(PROMPTS[1], WARM.replace(n=3, stop=stop), progress=False)
    for before, after in zip(whole.choices, cut.choices, strict=True):
        ends = stop in before.text
        assert after.text == (before.text[: before.text.index(stop)] if ends else before.text)
    assert cut.choices[1].finish_reason == "stop"


@pytest.mark.parametrize("num_host_pages", [0, 3, 40])
@pytest.mark.parametrize("policy", [cb.ChunkedPrefill(), cb.ContinuousBatching(victim="fewest_tokens")], ids=repr)
def test_swapped_and_computed_again_they_are_the_same(llm, policy, num_host_pages):
    expected = llm.requests(PROMPTS, WARM.replace(n=3))
    llm.run(expected, policy)
    requests = llm.requests(PROMPTS, WARM.replace(n=3))
    result = llm.run(requests, policy, num_pages=10, num_host_pages=num_host_pages)
    assert answers(llm, requests) == answers(llm, expected)
    samples = [s for r in requests for s in r.samples]
    assert sum(s.num_preemptions for s in samples) == result.requests.preemptions.sum() > 0
    assert (sum(s.num_swaps for s in samples) > 0) == (num_host_pages > 0)


def test_an_interrupt_frees_the_pages_of_all_samples(llm, monkeypatch):
    forward, calls = llm.runner.model.forward, []

    def interrupted(inputs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(inputs)

    stream = llm.stream(PROMPTS[2], greedy(20))
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, WARM.replace(n=3), progress=False)
    assert len(llm._engine._engine.scheduler.requests) == 1, "the stream's"
    assert llm.num_free_pages == 40 - len(stream.request.pages)
    assert llm._engine._texts._decoders.keys() <= {stream.request}
    stream.close()


def test_bad_values_are_named(llm):
    with pytest.raises(InvalidRequestError, match="a stream gives one answer, got n = 2"):
        llm.stream(PROMPTS[0], WARM.replace(n=2))
    with pytest.raises(InvalidRequestError, match="num_host_pages must be at most the 40 pages of this LLM, got 41"):
        llm.run(llm.requests(PROMPTS), num_host_pages=41)
    with pytest.raises(InvalidRequestError, match="num_host_pages"):
        llm.run(llm.requests(PROMPTS), num_host_pages=-1)
