import numpy as np
import pytest
from fake_runner import request, scheduler_of, serve
from hypothesis import given, settings
from random_workloads import POLICIES, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.inputs import pack
from contbatch.policies import ChunkedPrefill, StaticBatching
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams
from contbatch.step import Grant, SchedulerOutput


def step_of(*grants):
    return SchedulerOutput(0, list(grants), num_tokens=sum(g.num_tokens for g in grants))


def test_a_step_by_hand():
    """A chunk of a prompt, a whole prompt, a decode and a padded row."""
    a, b, c, d = (
        Request(name, prompt) for name, prompt in zip("abcd", ([10, 11, 12, 13], [20, 21], [30], [40]), strict=True)
    )
    a.pages, b.pages, c.pages, d.pages = [7, 3], [5], [2, 9, 4], [0]
    a.num_computed_tokens, c.num_computed_tokens, d.num_computed_tokens = 1, 3, 2
    c.output_token_ids += [31, 32, 33]
    d.output_token_ids += [41, 42]
    inputs = pack(
        step_of(
            Grant(a, 1, 2, samples=False, padding=False),
            Grant(b, 0, 2, samples=True, padding=False),
            Grant(c, 3, 1, samples=True, padding=False),
            Grant(d, 1, 1, samples=False, padding=True),
        )
    )
    assert inputs.input_ids.tolist() == [11, 12, 20, 21, 33, 41]
    assert inputs.cumulative_sequence_length.tolist() == [0, 2, 4, 5, 6]
    assert inputs.past_seqlens.tolist() == [1, 0, 3, 1]
    assert inputs.block_table.tolist() == [[7, 3, -1], [5, -1, -1], [2, 9, 4], [0, -1, -1]]
    assert inputs.logits_indices.tolist() == [3, 4]
    assert inputs.sampled == [b, c]
    types = {name: array.dtype.name for name, array in inputs.feed().items()}
    assert types == {
        "input_ids": "int64",
        "cumulative_sequence_length": "int32",
        "past_seqlens": "int32",
        "block_table": "int32",
        "logits_indices": "int64",
    }


def test_an_empty_step_has_empty_arrays():
    inputs = pack(step_of())
    shapes = {name: array.shape for name, array in inputs.feed().items()}
    assert shapes == {
        "input_ids": (0,),
        "cumulative_sequence_length": (1,),
        "past_seqlens": (0,),
        "block_table": (0, 0),
        "logits_indices": (0,),
    }
    assert inputs.sampled == []


def test_a_request_without_token_ids_is_an_error_that_names_it():
    r = Request("only a length", num_prompt_tokens=3)
    with pytest.raises(InvalidRequestError, match="only a length"):
        pack(step_of(Grant(r, 0, 3, samples=True, padding=False)))


def test_a_padded_row_samples_nothing():
    scheduler = scheduler_of(StaticBatching(2, pad=True), request("a", 1, 3), request("b", 1, 1))
    serve(scheduler, 1)
    inputs = pack(scheduler.schedule())
    assert [r.request_id for r in inputs.sampled] == ["a"]
    assert inputs.past_seqlens.tolist() == [1, 0]


@settings(max_examples=50)
@given(WORKLOADS, POLICIES)
def test_arrays_agree_with_the_grants(workload, policy):
    scheduler = scheduler_of(policy, *filter(workload.fits, workload.requests()), **workload.limits)
    while scheduler.has_requests:
        step = scheduler.schedule()
        inputs = pack(step)
        ends = inputs.cumulative_sequence_length
        assert np.diff(ends).tolist() == [g.num_tokens for g in step.grants]
        assert len(inputs.input_ids) == ends[-1] == step.num_tokens
        longest = max(len(g.request.pages) for g in step.grants)
        assert inputs.block_table.shape == (len(step.grants), longest)
        for row, (r, start, num_tokens, samples, _) in enumerate(step.grants):
            known = [*r.prompt_token_ids, *r.output_token_ids]
            assert inputs.input_ids[ends[row] : ends[row + 1]].tolist() == known[start : start + num_tokens]
            assert [page for page in inputs.block_table[row] if page >= 0] == r.pages
            assert samples == (ends[row + 1] - 1 in inputs.logits_indices)
        scheduler.update(step, scheduler.runner.execute(step).tokens)


def test_prompts_may_be_arrays():
    r = Request("array", np.arange(5), SamplingParams(max_tokens=2))
    scheduler = scheduler_of(ChunkedPrefill(), r, max_num_batched_tokens=3)
    assert pack(scheduler.schedule()).input_ids.tolist() == [0, 1, 2]
