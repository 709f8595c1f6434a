"""What a caller gets back for a prompt."""

from dataclasses import dataclass

from contbatch.logprob import Logprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's answer."""

    request_id: int | str
    prompt_token_ids: tuple[int, ...]
    text: str
    """The answer without special tokens, cut before a stop string."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    error: Exception | None
    """What went wrong if `finish_reason` is "error"."""
    logprobs: tuple[Logprobs, ...] | None = None
    """By output token, if `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """By prompt token, if `SamplingParams.prompt_logprobs` asked for them; None for the first: nothing predicts it."""
