"""A request on its way to an answer. Pure Python: no tensor, clock, tokenizer or device."""

from collections.abc import Hashable, Sequence
from enum import Enum

from contbatch.checks import is_int, is_key, is_real, python_number, require
from contbatch.errors import InvalidRequestError
from contbatch.logprob import Logprobs
from contbatch.sampling_params import SamplingParams
from contbatch.token_ids import end_tokens, prompt_length


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Back among the waiting, its pages taken away: to be computed again."""
    SWAPPED = "swapped"
    """Back among the waiting, its pages in host memory."""
    FORKING = "forking"
    """A further sample of a prompt that is not finished yet: starts to wait with its first token."""
    HELD = "held"
    """Finished, but static batching keeps its seat and pages until the longest of its batch ends."""
    FINISHED = "finished"


class Request:
    """One prompt on its way to an answer: the only mutable state that scheduler, runner and metrics share.

    Parameters
    ----------
    request_id : hashable
        Unique among the live requests of a scheduler.
    prompt_token_ids : sequence of int, optional
        The prompt; needed by real models.
    num_prompt_tokens : int, optional
        In place of `prompt_token_ids` where only lengths matter (simulation).
    sampling : SamplingParams
    arrival_time : float
        Seconds on the engine's clock.
    eos_token_ids : sequence of int
        Each ends generation unless `sampling.ignore_eos`; none comes before `sampling.min_tokens`.
    priority : float
        Smaller numbers are more important, as in vLLM (see `Priority`).
    client_id : hashable
        Whose request it is (see `FairShare`).
    ttft_target_s, tpot_target_s : float, optional
        Seconds > 0 within which the first token, and each further one, should come (see `DeadlineFirst`).
    expected_output_tokens : int, optional
        What an oracle, such as a trace, or a predictor says of the output's length; `sampling.max_tokens` if None.
    cache_salt : str, optional
        Only requests of equal salt (or all of none) share pages of a common prefix.
    """

    # fmt: off
    __slots__ = (
        "arrival_time", "cache_salt", "children", "client_id", "eos_token_ids", "error",
        "expected_output_tokens", "finish_reason", "host_pages", "num_cached_tokens", "num_computed_tokens",
        "num_forked_tokens", "num_preemptions", "num_prompt_tokens", "num_swaps", "order", "output_token_ids",
        "pages", "parent", "priority", "prompt_token_ids", "rank", "request_id", "sample_index", "sampling",
        "scores", "seat", "status", "stop_ids", "tpot_target_s", "ttft_target_s",
    )
    # fmt: on

    def __init__(
        self,
        request_id: int | str,
        prompt_token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        *,
        num_prompt_tokens: int | None = None,
        arrival_time: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        priority: float = 0,
        client_id: Hashable = None,
        ttft_target_s: float | None = None,
        tpot_target_s: float | None = None,
        expected_output_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        sampling = SamplingParams() if sampling is None else sampling
        sampling_ok = isinstance(sampling, SamplingParams)
        if not sampling_ok:
            require(False, "sampling", sampling, "a SamplingParams")
        if not is_int(request_id):
            require(is_key(request_id), "request_id", request_id, "hashable")
            request_id = python_number(request_id)
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = prompt_length(request_id, prompt_token_ids, num_prompt_tokens)
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.priority = priority
        self.client_id = client_id
        self.ttft_target_s = ttft_target_s
        self.tpot_target_s = tpot_target_s
        self.expected_output_tokens = sampling.max_tokens if expected_output_tokens is None else expected_output_tokens
        self.cache_salt = cache_salt
        self.eos_token_ids = end_tokens(request_id, eos_token_ids)
        eos = () if sampling.ignore_eos else self.eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids + eos)
        self._check()
        self._begin()

    def _begin(self) -> None:
        """Set what changes while the request lives."""
        self.status = RequestStatus.WAITING
        self.output_token_ids: list[int] = []
        self.scores: list[Logprobs] = []
        """Of consecutive tokens: the prompt's from the second on if these are wanted, the output's if those are."""
        self.num_computed_tokens = 0
        """Tokens whose K/V lie in this request's pages."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when it was first admitted."""
        self.pages: list[int] = []
        """The page table: page ids in token order."""
        self.host_pages: list[int] = []
        """While swapped out: host page ids in token order."""
        self.seat: int | None = None
        self.order = -1
        """Number given by the scheduler on arrival: breaks ties between equal arrival times."""
        self.rank = 0.0
        """Place among the waiting, given by the policy: see `Policy.rank`."""
        self.num_preemptions = 0
        """Of both kinds, by recomputation and by swap."""
        self.num_swaps = 0
        self.children: tuple[Request, ...] = ()
        """The further samples of this prompt, made by the scheduler (see `SamplingParams.n`)."""
        self.sample_index = 0
        """0, or which of the children this is."""
        self.parent: Request | None = None
        """Whose pages this request may begin from while both are live."""
        self.num_forked_tokens = 0
        """First so many tokens that it has in common with `parent`, or with the other samples of its prompt."""
        self.finish_reason: str | None = None
        """None while live, then "length", "stop", "abort", "error" or (never run, see `Engine.run`) "rejected"."""
        self.error: Exception | None = None

    def _check(self) -> None:
        """Raise `InvalidRequestError` for the first field that is out of its range."""
        time, most, salt = self.arrival_time, self.sampling.max_tokens, self.cache_salt
        if not (is_real(time) and time >= 0):
            self._refuse("arrival_time", "finite seconds ≥ 0")
        if not is_real(self.priority):
            self._refuse("priority", "a finite number")
        if not (self.client_id is None or is_key(self.client_id)):
            self._refuse("client_id", "hashable")
        if self.ttft_target_s is not None or self.tpot_target_s is not None:
            for name in ("ttft_target_s", "tpot_target_s"):
                if not ((target := getattr(self, name)) is None or (is_real(target) and target > 0)):
                    self._refuse(name, "None or finite seconds > 0")
        if not is_int(self.expected_output_tokens, 1, most):
            self._refuse("expected_output_tokens", f"an integer in [1, {most}] (max_tokens)")
        salt_ok = salt is None or isinstance(salt, str)
        if not salt_ok:
            self._refuse("cache_salt", "a string or None")

    def _refuse(self, name: str, limit: str) -> None:
        """Raise `InvalidRequestError`, unless what is wrong is that the number is NumPy's: it becomes Python's."""
        value = getattr(self, name)
        if (number := python_number(value)) is value:
            require(False, f"{name} of request {self.request_id!r}", value, limit)
        setattr(self, name, number)
        self._check()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose K/V are not in pages yet: what a step may grant. Decoding requests have one."""
        return self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose K/V will ever be held: the last output token is never fed back."""
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    @property
    def is_finished(self) -> bool:
        """Generation has ended (the seat may still be held, see `RequestStatus.HELD`)."""
        return self.finish_reason is not None

    @property
    def samples(self) -> "tuple[Request, ...]":
        """All samples of the prompt, this one first."""
        return self, *self.children

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the output tokens; None unless `sampling.logprobs` asks for them."""
        scores = self.logprobs
        if scores is None:
            return None
        return sum(score[token].logprob for score, token in zip(scores, self.output_token_ids, strict=False))

    def take(self, token: int) -> None:
        """Take in the next output token; `finish_reason` tells whether it is the last."""
        self.output_token_ids.append(token)
        if token in self.stop_ids and len(self.output_token_ids) > self.sampling.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.sampling.max_tokens:
            self.finish_reason = "length"

    @property
    def _num_prompt_scores(self) -> int:
        return self.num_prompt_tokens - 1 if self.sampling.prompt_logprobs is not None else 0

    @property
    def logprobs(self) -> list[Logprobs] | None:
        """What `sampling.logprobs` asks for, by output token; None if it does not."""
        return None if self.sampling.logprobs is None else self.scores[self._num_prompt_scores :]

    @property
    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """What `sampling.prompt_logprobs` asks for, by prompt token: None for the first, which nothing predicts."""
        return None if self.sampling.prompt_logprobs is None else [None, *self.scores[: self._num_prompt_scores]]

    def unscored_prompt_rows(self, start: int, stop: int) -> range:
        """Positions in start..stop-1 whose logits tell of a prompt token that is wanted and has no score yet."""
        return range(max(start, len(self.scores)), min(stop, self._num_prompt_scores))

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions start..stop-1, prompt and output as one sequence."""
        if self.prompt_token_ids is None:
            raise InvalidRequestError(f"request {self.request_id!r} has a prompt length but no prompt_token_ids")
        prompt, n = self.prompt_token_ids, self.num_prompt_tokens
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return [*prompt[start:stop], *self.output_token_ids[: max(0, stop - n)]]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}/{self.sampling.max_tokens}, computed {self.num_computed_tokens})"
        )
