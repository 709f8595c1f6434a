"""A model whose logits are a function of the tokens it finds in its pages, and an oracle that knows no pages."""

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
from invariants import CheckedScheduler

from contbatch.engine import Engine
from contbatch.request import Request
from contbatch.runners.model_runner import ModelRunner
from contbatch.runners.page_moves import move_pages
from contbatch.sampler import sample

VOCABULARY = 11


@lru_cache(None)
def logits_of(tokens):
    """Logits after `tokens`, in halves, so that some are equal; any change of any token changes them."""
    row = np.random.default_rng(np.array([len(tokens), *tokens])).standard_normal(VOCABULARY) * 2
    return (np.round(row * 2) / 2).astype(np.float32)


class FakeModel:
    """Pages hold token ids; `crash` names the calls, from 0, that raise with half of the tokens written."""

    config = SimpleNamespace(vocab_size=VOCABULARY)
    logits_of = staticmethod(logits_of)

    def __init__(self, num_pages, page_size, num_host_pages=0, crash=(), poison=()):
        self.num_pages, self.page_size = num_pages, page_size
        self.slots, self.host = np.full((num_pages, page_size), -1), np.full((num_host_pages, page_size), -1)
        self.crash, self.poison = set(crash), set(poison)
        self.calls = self.num_logits = 0

    def move_pages(self, moves):
        move_pages(moves, [self.slots], [self.host])

    def forward(self, inputs):
        ends, past, tables = (inputs[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table"))
        self.calls += 1
        where = []
        for row, table in enumerate(tables):
            for i in range(ends[row], ends[row + 1]):
                position = past[row] + i - ends[row]
                self.slots[table[position // self.page_size], position % self.page_size] = inputs["input_ids"][i]
                where.append((table, position + 1))
                if self.calls - 1 in self.crash and 2 * len(where) > ends[-1]:
                    raise RuntimeError(f"call {self.calls - 1} crashed")
        rows = []
        for i in inputs["logits_indices"]:
            table, count = where[i]
            tokens = tuple(self.slots[table].ravel()[:count].tolist())
            rows.append(np.full(VOCABULARY, np.nan, np.float32) if tokens in self.poison else self.logits_of(tokens))
        self.num_logits += len(rows)
        return np.array(rows, np.float32).reshape(-1, VOCABULARY)


class VirtualRunner(ModelRunner):
    """A step takes a second."""

    is_virtual = True

    def execute(self, step):
        return replace(super().execute(step), elapsed_s=1.0)


def engine_of(policy, model, **limits):
    """An engine on a model; its scheduler checks itself."""
    scheduler = CheckedScheduler(policy, num_pages=model.num_pages, page_size=model.page_size, **limits)
    return Engine(scheduler, VirtualRunner(model))


def adjusted(logits, request, output):
    """Bias, penalties and the ban on end tokens, token by token, in float64."""
    p, row, bias = request.sampling, np.asarray(logits, np.float64).tolist(), dict(request.sampling.logit_bias)
    seen, ends = {*request.prompt_token_ids, *output}, {*p.stop_token_ids, *request.eos_token_ids}
    for token in {*bias, *seen, *ends} & {*range(len(row))}:
        row[token] += bias.get(token, 0.0)
        if token in seen:
            row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
        if token in output:
            row[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
        if token in ends and len(output) < p.min_tokens:
            row[token] = -math.inf
    return row


def score(logits, token, count):
    """Log-probability and rank of a token and of the likeliest, by sorting everything, in float64."""
    row = np.asarray(logits, np.float64)
    total = row.max() + math.log(math.fsum(np.exp(row - row.max())))
    order = np.lexsort((np.arange(row.size), -row)).tolist()
    shown = [token, *order[: count if count >= 0 else None]]
    return {t: (float(row[t] - total), order.index(t) + 1) for t in shown}


def solo(request: Request, logits_of=logits_of):
    """Answer a request without batches, chunks or pages.

    Returns output tokens, finish reason, and scores (log-probability, rank) of output and prompt.
    """
    prompt, p, output, reason = list(request.prompt_token_ids), request.sampling, [], None
    of_output = None if p.logprobs is None else []
    seed = None if p.seed is None else p.seed + 2**64 * request.sample_index
    ends = p.stop_token_ids if p.ignore_eos else (*p.stop_token_ids, *request.eos_token_ids)
    while reason is None:
        logits = logits_of(tuple(prompt + output))
        row = np.array([adjusted(logits, request, output)], np.float32)
        token = int(sample(row, [p], [seed], [len(output)])[0][0])
        if of_output is not None:
            of_output.append(score(logits, token, p.logprobs))
        output.append(token)
        reason = "stop" if token in ends else "length" if len(output) == p.max_tokens else None
    of_prompt = None
    if p.prompt_logprobs is not None:
        rows = [logits_of(tuple(prompt[:n])) for n in range(1, len(prompt))]
        of_prompt = [None, *(score(row, token, p.prompt_logprobs) for row, token in zip(rows, prompt[1:], strict=True))]
    return output, reason, of_output, of_prompt


def same_scores(found, expected, tolerance):
    """Compare scores with the oracle's: the same tokens in the same order, the same ranks, nearly the same numbers."""
    assert (found is None) == (expected is None)
    assert len(found or ()) == len(expected or ())
    for ours, theirs in zip(found or (), expected or (), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert list(ours) == list(theirs)
            assert [s.rank for s in ours.values()] == [rank for _, rank in theirs.values()]
            for s, (logprob, _) in zip(ours.values(), theirs.values(), strict=True):
                assert abs(s.logprob - logprob) <= tolerance, (s, logprob)
