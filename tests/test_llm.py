"""The facade on the real model: greedy answers, streams, interrupts, threads."""

import gc
import threading

import numpy as np
import pytest
from smollm2 import golden, model_path

import contbatch as cb
from contbatch.errors import InvalidRequestError, RunnerError
from contbatch.model import load_model
from dense_model import dense_logits

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
