"""Beam search: the likeliest answers as a whole, not token by token."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import count

from contbatch.checks import is_real, require, require_counts, require_type, take_python_numbers
from contbatch.engine import Runner
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams
from contbatch.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How far and how wide to search; names and defaults after vLLM. Bad values raise `InvalidRequestError`.

    Parameters
    ----------
    beam_width : int
        Answers kept at every step, and returned; 1 is greedy.
    max_tokens : int
        Most output tokens.
    length_penalty : float
        In [-10, 10]. An answer of n tokens scores its log-probability / n ** length_penalty: 0 favours short answers,
        1 compares means, more favours long ones. An end-of-sequence token counts, the prompt does not.
    ignore_eos : bool
        Go on past the model's end-of-sequence tokens.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_counts(beam_width=self.beam_width, max_tokens=self.max_tokens)
        penalty_ok = is_real(self.length_penalty) and -10 <= self.length_penalty <= 10
        require(penalty_ok, "length_penalty", self.length_penalty, "in [-10, 10]")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")

    def score(self, logprob: float, num_tokens: int) -> float:
        """Return what an answer of so many tokens and this log-probability is worth."""
        return logprob / math.pow(num_tokens, self.length_penalty)

    def best_score(self, logprob: float, num_tokens: int) -> float:
        """Return the most that an answer can be worth that goes on from so many tokens of this log-probability."""
        return self.score(logprob, self.max_tokens if self.length_penalty > 0 else num_tokens + 1)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer found by a beam search."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str
    """"stop" at an end-of-sequence token, "length" at `max_tokens`."""


@dataclass(frozen=True, slots=True)
class BeamSearchResult:
    """What was found for one prompt."""

    hypotheses: tuple[Hypothesis, ...]
    """The `beam_width` answers of the best scores, best first; fewer if the vocabulary has no more."""
    error: Exception | None
    """What ended the search too early."""


@dataclass(slots=True, eq=False)
class _Beam:
    """A running request whose last output token is the model's choice until the search has made its own."""

    request: Request
    logprob: float
    """Of all tokens before the last."""


class _Search:
    """The search for one prompt."""

    def __init__(self, name: int | str, prompt: Request, scheduler: Scheduler, params: BeamSearchParams) -> None:
        self._name, self._prompt, self._scheduler, self._params = name, prompt, scheduler, params
        self._ends = frozenset() if params.ignore_eos else frozenset(prompt.eos_token_ids)
        self._serial = count()
        self._depth = 0
        """Output tokens that are decided."""
        self.found: list[Hypothesis] = []
        self.error: Exception | None = None
        root = self._new_request()
        scheduler.add(root)
        self.beams = [_Beam(root, 0.0)]

    def _new_request(self) -> Request:
        # Of each beam so many extensions are enough: at most len(_ends) of them are not among those that go on.
        extensions = self._params.beam_width + len(self._ends)
        sampling = SamplingParams(max_tokens=self._params.max_tokens, ignore_eos=True, logprobs=extensions)
        return Request(
            f"{self._name}/{next(self._serial)}",
            self._prompt.prompt_token_ids,
            sampling,
            client_id=self._name,
            arrival_time=self._prompt.arrival_time,
            cache_salt=self._prompt.cache_salt,
        )

    def advance(self) -> None:
        """Choose the next token of every beam, once all have theirs."""
        self.error = next((beam.request.error for beam in self.beams if beam.request.error is not None), None)
        if self.error is not None:
            self.close()
        elif all(beam.request.num_output_tokens > self._depth for beam in self.beams):
            self._depth += 1
            chosen = self._choose()
            if self._depth < self._params.max_tokens:
                self._go_on(chosen)
            else:
                for beam, token, logprob in chosen:
                    self._find(beam, token, logprob, "length")
                self.close()

    def _choose(self) -> list[tuple[_Beam, int, float]]:
        """Return the likeliest extensions that go on; those likelier than the last of them that end are found."""
        extensions = [
            (beam, token, beam.logprob + score.logprob)
            for beam in self.beams
            for token, score in beam.request.scores[-1].items()
        ]
        chosen: list[tuple[_Beam, int, float]] = []
        for beam in self.beams:
            beam.request.scores.clear()
        for beam, token, logprob in sorted(extensions, key=lambda extension: -extension[2]):
            if len(chosen) == self._params.beam_width:
                break
            if token in self._ends:
                self._find(beam, token, logprob, "stop")
            else:
                chosen.append((beam, token, logprob))
        return chosen

    def _find(self, beam: _Beam, token: int, logprob: float, reason: str) -> None:
        tokens = (*beam.request.output_token_ids[:-1], token)
        self.found.append(Hypothesis(tokens, logprob, self._params.score(logprob, len(tokens)), reason))

    def _go_on(self, chosen: Iterable[tuple[_Beam, int, float]]) -> None:
        """Give a beam's request to its first extension, fork others from it, and end beams without any."""
        before, self.beams = self.beams, []
        first: dict[_Beam, int] = {}
        for beam, token, logprob in chosen:
            request = beam.request
            if beam in first:
                request = self._new_request()
                request.output_token_ids = [*beam.request.output_token_ids[:-1], token]
                self._scheduler.fork(beam.request, request)
            else:
                first[beam] = token
            self.beams.append(_Beam(request, logprob))
        for beam, token in first.items():  # last: nothing is forked from tokens that are not computed
            beam.request.output_token_ids[-1] = token
        self._end(beam for beam in before if beam not in first)
        if self._is_decided():
            self.close()

    def _is_decided(self) -> bool:
        """Whether nothing that goes on can come to be among the best."""
        width = self._params.beam_width
        best = nlargest(width, (hypothesis.score for hypothesis in self.found))
        hope = max((self._params.best_score(beam.logprob, self._depth) for beam in self.beams), default=float("-inf"))
        return len(best) == width and best[-1] > hope

    def _end(self, beams: Iterable[_Beam]) -> None:
        for beam in beams:
            self._scheduler.abort(beam.request.request_id)
            beam.request.parent = None  # else each request would keep all those before it

    def close(self) -> None:
        """Free what the search holds; idempotent."""
        self._end(self.beams)
        self.beams = []

    def result(self) -> BeamSearchResult:
        """Return the best of what was found; of equal scores what was found first."""
        best = sorted(self.found, key=lambda hypothesis: -hypothesis.score)[: self._params.beam_width]
        return BeamSearchResult(tuple(best), self.error)


def beam_search(
    scheduler: Scheduler, runner: Runner, prompts: Sequence[Request], params: BeamSearchParams
) -> list[BeamSearchResult]:
    """Search for the likeliest answers to prompts, all of them side by side.

    A beam is a request: it starts from the pages of the one it was forked from, full pages shared, the last copied when
    both write in it; a beam that is dropped frees its pages at once. At every step all beams of a prompt are extended
    by the tokens that the model finds likeliest; the `beam_width` likeliest extensions go on. Those that end with an
    end-of-sequence token and are likelier than the last of these are answers. The search goes on until nothing can
    get among the best any more, or to `max_tokens`.

    Parameters
    ----------
    scheduler : Scheduler
        With the policy `Lockstep` and nobody in it.
    runner : Runner
        Gives log-probabilities.
    prompts : sequence of Request
        Of each its prompt, end-of-sequence tokens and salt count; it is not run itself.
    params : BeamSearchParams

    Raises
    ------
    InvalidRequestError
        A prompt can never run, or the vocabulary is smaller than the beam. Nothing has been computed then.
    """
    require_type("params", params, BeamSearchParams)
    searches: list[_Search] = []
    try:
        for name, prompt in enumerate(prompts):
            searches.append(_Search(name, prompt, scheduler, params))
            runner.validate(searches[-1].beams[0].request)
        while scheduler.has_requests:
            step = scheduler.schedule()
            result = runner.execute(step)
            scheduler.update(step, result.tokens, result.errors, scores=result.scores)
            for search in searches:
                if search.beams:
                    search.advance()
    except BaseException:
        for search in searches:
            search.close()
        raise
    return [search.result() for search in searches]
