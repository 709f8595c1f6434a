"""The prefix cache on the real model: the same tokens for less work."""

import pytest
from smollm2 import model_path

import contbatch as cb
from contbatch.errors import InvalidRequestError

SYSTEM = {"role": "system", "content": "Answer in one short sentence, and say only what you are sure of. " * 2}
TALKS = [[SYSTEM, {"role": "user", "content": f"What is {x}?"}] for x in ("rain", "bread", "a clock")]
SAMPLING = cb.SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with cb.LLM(model_path(), num_pages=100, prefix_cache=True) as llm:
        yield llm


def tokens_of(llm, policy=None, **limits):
    """The answers to all, one arriving after the other has been answered."""
    requests = llm.requests(TALKS, SAMPLING, [0.0, 1e3, 2e3])
    result = llm.run(requests, policy, **limits)
    return [r.output_token_ids for r in requests], result


def test_tokens_are_those_without_the_cache_and_the_common_part_is_computed_once(llm):
    expected, without = tokens_of(llm, prefix_cache=False)
    tokens, result = tokens_of(llm)
    assert tokens == expected
    prompts, size = [r.prompt_token_ids for r in llm.requests(TALKS)], llm.runner.model.page_size
    common = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1) // size * size
    assert common > 0
    assert without.summary().hit_rate == 0.0
    assert list(result.requests.cached_tokens) == [0, common, common]
    assert result.steps.prefill_tokens.sum() == without.steps.prefill_tokens.sum() - 2 * common
    assert result.summary().hit_rate == 2 * common / sum(map(len, prompts))


def test_tokens_do_not_depend_on_evictions_and_preemptions(llm):
    expected, _ = tokens_of(llm, prefix_cache=False)
    requests = llm.requests(TALKS, SAMPLING, [0.0, 1e-3, 1e-3])
    result = llm.run(requests, cb.ChunkedPrefill(), num_pages=6, max_num_batched_tokens=40)
    assert [r.output_token_ids for r in requests] == expected
    assert result.summary().hit_rate > 0


def test_the_cache_lives_as_long_as_the_llm_but_not_across_a_run_that_uses_its_pages(llm):
    """What `run` writes is not what an earlier `generate` left in the same pages."""
    first = llm.generate(TALKS, SAMPLING, progress=False)
    again = llm.generate(TALKS, SAMPLING, progress=False)
    assert [o.token_ids for o in again] == [o.token_ids for o in first]
    other = llm.requests("1, 2, 3, 4, " * 16, SAMPLING)
    llm.run(other)
    last = llm.generate(TALKS, SAMPLING, progress=False)
    assert [o.token_ids for o in last] == [o.token_ids for o in first]
    assert llm.num_free_pages == 100


def test_the_next_turn_of_a_conversation_finds_the_last_answer(llm):
    [answer] = llm.generate(TALKS[0], SAMPLING.replace(max_tokens=24), progress=False)
    known = [*answer.prompt_token_ids, *answer.token_ids]
    request = cb.Request("next", [*known, 11, 12, 13], SAMPLING)
    llm._engine.submit([request])
    while not request.is_finished:
        llm._engine.step()
    size = llm.runner.model.page_size
    assert request.num_cached_tokens == (len(known) - 1) // size * size > len(answer.prompt_token_ids)
    alone = cb.Request("alone", request.prompt_token_ids, SAMPLING)
    llm.run([alone], prefix_cache=False)
    assert request.output_token_ids == alone.output_token_ids


def test_the_option_is_true_or_false():
    with pytest.raises(InvalidRequestError, match="prefix_cache must be True or False, got 'on'"):
        cb.LLM(model_path(), num_pages=8, prefix_cache="on")
