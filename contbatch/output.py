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
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`, if `SamplingParams.logprobs` or `best_of` asked for them."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """By prompt token, if `SamplingParams.prompt_logprobs` asked for them; None for the first: nothing predicts it."""
    further: tuple["RequestOutput", ...] = ()
    """The other answers if `SamplingParams.n` asked for several."""

    @property
    def choices(self) -> "tuple[RequestOutput, ...]":
        """All answers, this one first; with `best_of` or from a beam search the best comes first."""
        return self, *self.further
