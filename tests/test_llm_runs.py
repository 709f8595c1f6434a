"""LLM.requests and LLM.run: fields of requests, memory layouts, the decision log; and input that is wrong."""

import builtins
import importlib
import os
from functools import partial

import pytest
from tiny_llm import PROMPTS, greedy, write_tiny

import contbatch as cb
from contbatch.errors import InvalidRequestError, MissingDependencyError, ModelFileError, PolicyError
from contbatch.policies import ChunkedPrefill, Orca


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with cb.LLM(write_tiny(tmp_path_factory.mktemp("tiny")), num_pages=40, page_size=4, num_host_pages=8) as made:
        yield made


def answers(llm, **limits):
    requests = llm.requests(PROMPTS, [greedy(6), greedy(9, n=2, temperature=1.0, seed=3), greedy(7)])
    result = llm.run(requests, **limits)
    return [[sample.output_token_ids for sample in r.samples] for r in requests], result


def test_the_tokens_are_the_same_in_either_layout_with_and_without_swaps(llm):
    undisturbed, _ = answers(llm)
    for policy in (ChunkedPrefill(), Orca("oracle")):
        for layout in ("paged", "contiguous"):
            for num_host_pages in (0, 8):
                log = cb.DecisionLog()
                limits = {"num_pages": 8, "num_host_pages": num_host_pages, "layout": layout}
                tokens, result = answers(llm, policy=policy, log=log, **limits)
                assert tokens == undisturbed
                assert result.decisions is log
                assert log.settings["layout"] == layout
                assert len([*log.states()]) == len(result.steps)


def test_an_llm_may_have_contiguous_memory_for_all_its_calls(tmp_path):
    with cb.LLM(write_tiny(tmp_path), num_pages=40, page_size=4, layout="contiguous") as llm:
        contiguous = [o.token_ids for o in llm.generate(PROMPTS, greedy(5), progress=False)]
        with pytest.raises(InvalidRequestError, match="prefix_cache must be False with layout 'contiguous'"):
            llm.run([], prefix_cache=True)
        assert answers(llm)[1].summary().requests == 4
    with pytest.raises(InvalidRequestError, match="layout must be 'paged' or 'contiguous', got 'heap'"):
        cb.LLM("never loaded", layout="heap")
    with cb.LLM(tmp_path, num_pages=40, page_size=4) as llm:
        assert [o.token_ids for o in llm.generate(PROMPTS, greedy(5), progress=False)] == contiguous


def test_requests_have_the_fields_that_policies_look_at(llm):
    requests = llm.requests(
        PROMPTS, greedy(4), [0.0, 1.0, 2.0], priority=[2, 1, 0], client_id="me", cache_salt="mine", ttft_target_s=2.0,
        tpot_target_s=[None, 1.0, 1.0], expected_output_tokens=3,
    )  # fmt: skip
    assert [r.priority for r in requests] == [2, 1, 0]
    assert [r.arrival_time for r in requests] == [0, 1, 2]
    assert [r.tpot_target_s for r in requests] == [None, 1.0, 1.0]
    assert {(r.client_id, r.cache_salt, r.ttft_target_s, r.expected_output_tokens) for r in requests} == {
        ("me", "mine", 2.0, 3)
    }


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((PROMPTS, None, 1.0), {}, "arrival_times must be a list of seconds.* got 1.0"),
        ((PROMPTS, None, [1.0]), {}, "3 prompts, but 1 arrival times"),
        ((PROMPTS,), {"priority": [1]}, "3 prompts, but 1 priority"),
        ((PROMPTS,), {"priority": "high"}, "priority of request 0 must be a finite number, got 'high'"),
        ((PROMPTS,), {"prioritty": 1}, "a field of requests must be one of priority, .* got 'prioritty'"),
        (({"a", "b"},), {}, "a prompt is text, token ids or a conversation, got {"),
        (([{1, 2}],), {}, "a prompt is text, token ids or a conversation, got {1, 2}"),
        ((None,), {}, "a prompt is text, token ids or a conversation, got None"),
    ],
)
def test_what_can_not_be_requests_is_named(llm, arguments, fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.requests(*arguments, **fields)


def test_lists_of_requests_put_together_are_not_run_in_part(llm):
    with pytest.raises(InvalidRequestError, match="request id 0 is that of two requests of one run"):
        llm.run(llm.requests("a") + llm.requests("b"))
    with pytest.raises(InvalidRequestError, match="what is run must be of type Request, got 'text'"):
        llm.run(["text"])
    assert len(llm.run(llm.requests(["a", "b"], greedy(2))).finished) == 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_more_pages_than_memory_are_refused_with_both_numbers(backend, tmp_path, monkeypatch):
    model = write_tiny(tmp_path)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64}.get)
    for limits in ({"num_pages": 3000}, {"num_pages": 8, "num_host_pages": 3000}):
        with pytest.raises(InvalidRequestError, match=r"3000.* must be at most \d+: a page takes \d+ bytes"):
            cb.LLM(model, backend=backend, **limits)


@pytest.mark.parametrize("name", ["num_pages", "num_host_pages"])
def test_no_pool_is_larger_than_its_bookkeeping_allows(name):
    for make in (partial(cb.Scheduler, ChunkedPrefill()), cb.LLM):
        with pytest.raises(InvalidRequestError, match=rf"{name} must be .*10000000.*, got 1000000000"):
            make(**{"num_pages": 8, name: 10**9})


@pytest.mark.parametrize("model", [None, 5, b"smollm2-135m"])
def test_a_model_is_a_name_or_a_path(model):
    with pytest.raises(ModelFileError, match="a model is a name or a path, got"):
        cb.LLM(model)


def test_bad_options_of_policies_are_named():
    class Nonsense(ChunkedPrefill):
        release = "nonsense"

    with pytest.raises(PolicyError, match=r"Nonsense.release must be 'token' or 'batch', got 'nonsense'"):
        cb.Scheduler(Nonsense(), num_pages=4)
    with pytest.raises(InvalidRequestError, match="pad must be True or False, got 'yes'"):
        cb.StaticBatching(pad="yes")


def test_plots_without_matplotlib_say_how_to_install_it(monkeypatch):
    plots, real = importlib.import_module("contbatch.plots"), builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(MissingDependencyError, match=r"pip install 'contbatch\[notebooks\]'"):
            importlib.reload(plots)
    importlib.reload(plots)
