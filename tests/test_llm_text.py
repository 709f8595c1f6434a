"""Text, stop strings and prompts through the facade, on a tiny random model with a byte-level tokenizer."""

import numpy as np
import pytest
from tiny_llm import PROMPTS, greedy, ran, tokens_of, write_tiny
from tiny_tokenizers import TOKENS

import contbatch as cb
from contbatch.errors import InvalidRequestError, LogitsError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with cb.LLM(folder, num_pages=32, max_num_seqs=4) as llm:
        yield llm
        assert llm.num_free_pages == 32


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[70, 71, 3], [8, 9, 10], "the 12"])
def test_every_piece_of_the_text_stops_it(llm, prompt):
    [whole] = llm.generate(prompt, greedy(24), progress=False)
    assert whole.finish_reason == "length"
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    for start in range(0, len(whole.text), 2):
        for length in (1, 4):
            stop = whole.text[start : start + length]
            sampling = greedy(24, stop=(stop, "never"))
            [cut] = llm.generate(prompt, sampling, progress=False)
            stream = llm.stream(prompt, sampling)
            assert cut.text == "".join(stream) == whole.text[: whole.text.index(stop)]
            assert cut.finish_reason == stream.request.finish_reason == "stop"
            assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_a_stop_token_and_the_end_of_sequence_end_the_answer(llm):
    [whole] = llm.generate(PROMPTS[0], greedy(20), progress=False)
    stop = whole.token_ids[7]
    [cut] = llm.generate(PROMPTS[0], greedy(20, stop_token_ids=stop), progress=False)
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 17, 3))
def test_a_stream_that_ends_before_its_batch_gives_all_its_text(folder, max_tokens):
    """Its last bytes may be no whole character, and its seat is held until the longer one has ended."""
    with cb.LLM(folder, num_pages=32, policy=cb.StaticBatching(2)) as llm:
        for prompt in ([8, 9, 10], [5, 6]):
            [alone] = llm.generate([prompt], greedy(max_tokens), progress=False)
            short, long = llm.stream(prompt, greedy(max_tokens)), llm.stream([4, 5], greedy(max_tokens + 5))
            assert "".join(short) == alone.text
            long.close()
        assert llm.num_free_pages == 32


def test_the_reference_gives_the_same_answers(folder, llm):
    with cb.LLM(folder, backend="reference", num_pages=8) as reference:
        assert tokens_of(reference, max_tokens=6) == tokens_of(llm, max_tokens=6)
    for options in ({"precision": "bf16"}, {"kv_dtype": "f32"}, {"num_threads": 1}):
        with pytest.raises(InvalidRequestError, match="'reference'"):
            cb.LLM(folder, backend="reference", num_pages=8, **options)


# ---- prompts ---------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "the"}


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        ([np.array([1, 2]), np.array([3])], [2, 1]),
        (np.array([[1, 2, 3], [4, 5, 6]]), [3, 3]),
        (np.array([1, 2], np.uint8), [2]),
        ([np.int32(3), np.int64(4)], [2]),
        (range(3), [3]),
        ((iter([1, 2]), (3,)), [2, 1]),
        (iter([[1], "the"]), [1, 2]),
        ([USER, USER], [14]),
        ([[USER], [USER, USER]], [7, 14]),
    ],
)
def test_prompts_of_many_kinds(llm, prompts, lengths):
    outputs = llm.generate(prompts, greedy(1), progress=False)
    assert [len(o.prompt_token_ids) for o in outputs] == lengths


@pytest.mark.parametrize(
    "prompts",
    [5, None, [None], [1.0, 2.0], np.array([1.0]), [np.array([1.0])], b"the", [b"the"], USER, [[[1]]], [2**70]],
)
def test_what_is_no_prompt_is_named(llm, prompts):
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, greedy(1), progress=False)
    if prompts != [2**70]:
        with pytest.raises(InvalidRequestError):
            llm.chat(prompts, greedy(1), progress=False)


@pytest.mark.parametrize("sampling", [{}, 0, "a", [None, 5], [greedy(1)], iter([])])
def test_what_is_no_sampling_is_named(llm, sampling):
    with pytest.raises(InvalidRequestError):
        llm.generate(["a", "b"], sampling, progress=False)


def test_bad_requests_don_t_disturb_a_run(llm, monkeypatch):
    expected = [r.output_token_ids for r in ran(llm, PROMPTS)]
    forward = llm.runner.model.forward

    def with_nan(inputs):
        logits = forward(inputs).copy()
        logits[(inputs["input_ids"] == 250)[inputs["logits_indices"]]] = np.nan
        return logits

    monkeypatch.setattr(llm.runner.model, "forward", with_nan)
    *good, failed, foreign, long = ran(llm, [*PROMPTS, [1, 250], [len(TOKENS)], [1] * 600])
    assert [r.output_token_ids for r in good] == expected
    assert isinstance(failed.error, LogitsError)
    assert [r.finish_reason for r in (failed, foreign, long)] == ["error", "rejected", "rejected"]
