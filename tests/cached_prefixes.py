"""Requests that begin alike, one after the other, in a scheduler with a prefix cache."""

from fake_runner import scheduler_of, serve, solo

from contbatch.policies import ChunkedPrefill
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams


def ask(name, prompt, output=1, salt=None, at=0.0):
    sampling = SamplingParams(max_tokens=output)
    return Request(name, list(prompt), sampling, cache_salt=salt, arrival_time=at)


def caching(*requests, policy=None, **limits):
    """A scheduler with a prefix cache, pages of 4 tokens, that checks itself."""
    return scheduler_of(policy or ChunkedPrefill(), *requests, **{"prefix_cache": True, **limits})


def pages(pool):
    return pool.num_free, pool.num_cached, pool.num_live


def run_alone(scheduler, request):
    """Serve one request after all others; return how many of its tokens were cached."""
    serve(scheduler)
    scheduler.add(request)
    serve(scheduler)
    assert (request.output_token_ids, request.finish_reason) == solo(request)
    return request.num_cached_tokens
