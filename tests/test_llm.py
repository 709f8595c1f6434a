"""The facade on the real model: greedy answers, streams, interrupts, threads."""

import gc
import threading

import numpy as np
import pytest
from dense_model import dense_logits
from smollm2 import golden, model_path

import contbatch as cb
from contbatch.errors import InvalidRequestError, RunnerError
from contbatch.model import load_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n", "Once upon a time, there was a"]


@pytest.fixture(scope="module")
def llm():
    with cb.LLM(model_path(), num_pages=200) as llm:
        yield llm
        assert llm.num_free_pages == 200


@pytest.fixture(scope="module")
def model():
    return load_model(model_path())


def greedy(max_tokens, **changes):
    return cb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def tokens_of(llm, policy=None, max_tokens=12, **limits):
    requests = llm.requests(PROMPTS, [greedy(max_tokens + i) for i in range(len(PROMPTS))])
    result = llm.run(requests, policy, **limits)
    return [r.output_token_ids for r in requests], result


def greedy_by_dense(model, prompt, answer):
    """What a dense forward pass over prompt and answer would have chosen at each place of the answer."""
    logits = dense_logits(model, np.array([*prompt, *answer[:-1]]), np.float32)
    return logits[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_greedy_tokens_are_those_of_a_dense_forward_pass(llm, model):
    for output in llm.generate([*PROMPTS, QUESTION], greedy(24), progress=False):
        assert list(output.token_ids) == greedy_by_dense(model, output.prompt_token_ids, output.token_ids)


def test_greedy_tokens_equal_the_golden_ones(llm, model):
    """The golden file's reference hid prompt tokens equal to the padding token (2, which ends each chat message).

    Where a prompt has none, all 64 tokens must be the same. Where it has some, our tokens must be those of a dense
    forward pass that hides nothing.
    """
    cases = golden()
    outputs = llm.generate([c["prompt_token_ids"] for c in cases], greedy(64), progress=False)
    unmasked = [c for c in cases if llm.tokenizer.eos_token_id not in c["prompt_token_ids"]]
    assert len(unmasked) >= 2
    for case, output in zip(cases, outputs, strict=True):
        if case in unmasked:
            assert list(output.token_ids) == case["token_ids"]
        else:
            assert list(output.token_ids) == greedy_by_dense(model, case["prompt_token_ids"], output.token_ids)


@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        (cb.OneAtATime(), {}),
        (cb.StaticBatching(3, pad=True), {}),
        (cb.ContinuousBatching(), {"max_num_batched_tokens": 5}),
        (cb.Orca(), {"max_num_seqs": 2}),
        (cb.ChunkedPrefill(), {"num_pages": 3}),
    ],
    ids=["one", "static", "chunks", "orca", "preempted"],
)
def test_tokens_do_not_depend_on_the_policy(llm, policy, limits):
    expected, _ = tokens_of(llm)
    tokens, result = tokens_of(llm, policy, **limits)
    assert tokens == expected
    assert (limits.get("num_pages") == 3) == (result.requests.preemptions.sum() > 0)


def test_sampled_tokens_do_not_depend_on_who_shares_the_batch(llm):
    sampling = greedy(10, temperature=1.0, top_p=0.95, seed=7)
    [alone] = llm.generate(PROMPTS[0], sampling, progress=False)
    outputs = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[0]], sampling, progress=False)
    assert outputs[1].token_ids == outputs[2].token_ids == alone.token_ids
    assert llm.generate(PROMPTS[0], sampling.replace(seed=8), progress=False)[0].token_ids != alone.token_ids


def test_chat_answers_the_question(llm):
    [output] = llm.chat(QUESTION, cb.SamplingParams(max_tokens=30), progress=False)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == llm.tokenizer.eos_token_id


def test_several_conversations_and_token_ids(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    by_text, by_ids, by_array = llm.generate([PROMPTS[0], ids, np.array(ids)], greedy(5), progress=False)
    assert by_text.token_ids == by_ids.token_ids == by_array.token_ids
    assert len(llm.chat([QUESTION, QUESTION], greedy(2), progress=False)) == 2


def test_a_stop_string_ends_the_request_and_is_cut_off(llm):
    [whole] = llm.generate(PROMPTS[1], greedy(20), progress=False)
    stop = whole.text[9:12]
    [cut] = llm.generate(PROMPTS[1], greedy(20, stop=stop), progress=False)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.token_ids) < 20


def test_stream_gives_the_text_of_generate_piece_by_piece(llm):
    [whole] = llm.generate(QUESTION, greedy(20), progress=False)
    stream = llm.stream(QUESTION, greedy(20))
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == whole.text
    assert stream.request.finish_reason == "length"
    assert list(stream) == []


def test_a_stream_left_early_frees_its_pages(llm):
    stream = llm.stream(PROMPTS[3], greedy(50))
    next(stream)
    assert llm.num_free_pages < 200
    with pytest.raises(RunnerError, match="not finished"):
        llm.run(llm.requests(PROMPTS[0]))
    stream.close()
    assert llm.num_free_pages == 200
    assert stream.request.finish_reason == "abort"
    stream = llm.stream(PROMPTS[3], greedy(50))  # queued, never begun
    del stream
    gc.collect()
    assert llm.num_free_pages == 200
    assert llm.generate(PROMPTS[0], greedy(2), progress=False)[0].finish_reason == "length"


def test_streams_and_generate_share_batches(llm):
    [a], [b] = (llm.generate(p, greedy(9), progress=False) for p in PROMPTS[:2])
    first, second = (llm.stream(p, greedy(9)) for p in PROMPTS[:2])
    pieces = [next(first), next(second)]
    [c] = llm.generate(PROMPTS[2], greedy(3), progress=False)
    assert c.finish_reason == "length"
    assert pieces[0] + "".join(first) == a.text
    assert pieces[1] + "".join(second) == b.text


@pytest.mark.parametrize("step", [0, 3])
def test_an_interrupt_frees_every_page_and_the_next_call_works(llm, step, monkeypatch):
    [expected] = llm.generate(PROMPTS[0], greedy(4), progress=False)
    forward, calls = llm.runner.model.forward, []

    def interrupted(inputs):
        calls.append(1)
        if len(calls) > step:
            raise KeyboardInterrupt
        return forward(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(8), progress=False)
    assert llm.num_free_pages == 200
    assert llm.generate(PROMPTS[0], greedy(4), progress=False)[0].token_ids == expected.token_ids


def test_threads_share_the_model(llm):
    expected = [o.token_ids for o in llm.generate(PROMPTS, greedy(8), progress=False)]
    found = {}

    def work(i):
        found[i] = llm.generate(PROMPTS[i], greedy(8), progress=False)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], None, None),
        ("", None, "prompt length"),
        ([[]], None, "prompt length"),
        ([[1, 49152]], None, r"49152 is not in \[0, 49152\)"),
        ([[1, -1]], None, "an integer ≥ 0, got -1"),
        ([["a", 2]], None, "'a'"),
        (PROMPTS, [cb.SamplingParams()], "4 prompts, but 1"),
        ("a", cb.SamplingParams(max_tokens=9000), "max_model_len 8192"),
        ([1] * 4000, None, "250 pages|254 pages"),
    ],
)
def test_bad_prompts_are_named_and_leave_nothing_behind(llm, prompts, sampling, message):
    if message is None:
        assert llm.generate(prompts, sampling, progress=False) == []
    else:
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(prompts, sampling, progress=False)
    assert llm.num_free_pages == 200


def test_a_request_that_fails_fails_alone(llm, monkeypatch):
    forward = llm.runner.model.forward

    def with_nan(inputs):
        logits = forward(inputs).copy()
        logits[-1, 5] = np.nan
        return logits

    monkeypatch.setattr(llm.runner.model, "forward", with_nan)
    *good, bad = llm.generate(PROMPTS[:2], [greedy(4), greedy(2)], progress=False)
    assert bad.finish_reason == "error"
    assert "nan" in str(bad.error).lower()
    assert [o.finish_reason for o in good] in (["length"], ["error"])


def test_closed_is_closed():
    llm = cb.LLM(model_path(), num_pages=8)
    llm.close()
    llm.close()
    with pytest.raises(RunnerError, match="close"):
        llm.generate("a", progress=False)
    assert llm.num_free_pages == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tpu"}, "'tpu'"),
        ({"precision": "f8"}, "'f8'"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of 'f32', 'bf16', 'int8', got 'int4'"),
        ({"num_pages": 0}, "num_pages"),
        ({"page_size": 0}, "page_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        cb.LLM(model_path(), **{"num_pages": 8, **options})
