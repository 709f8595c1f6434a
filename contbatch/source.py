"""Turns the rows of a workload into requests: the first of each session at once, the others as answers come."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from contbatch.checks import is_int, python_number, require, tuple_of
from contbatch.errors import WorkloadError
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams
from contbatch.turn import PromptTokens, Turn

STOP_TOKEN = 1
"""Ends an answer that is shorter than what its client asked for; only a simulated runner knows when."""
DEFAULT_VOCAB_SIZE = 32_000
AHEAD = 32
"""Requests made at a time."""


class Source:
    """Makes the requests of a run, numbered as the turns are. It keeps no state: requests say where they stand.

    Parameters
    ----------
    turns : sequence of Turn
        Those of a session side by side, in order.
    vocab_size : int
        Prompts have token ids below it: give that of the model if a real one is to run them.

    Notes
    -----
    `Engine.run(source.requests(), on_finish=source.on_finish)` runs the workload. A source can serve many runs.
    """

    def __init__(self, turns: Sequence[Turn], vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        vocab_size = python_number(vocab_size)
        require(is_int(vocab_size, 1, 2**31), "vocab_size", vocab_size, "an integer in [1, 2**31]", WorkloadError)
        self.turns, self.vocab_size = tuple_of(turns, "turns", "a list of turns", WorkloadError), vocab_size
        for kind in {*map(type, self.turns)}:
            require(issubclass(kind, Turn), "a turn", kind, "a Turn", WorkloadError)
        starts = [i for i, (a, b) in enumerate(pairwise(self.turns), 1) if a.session != b.session]
        self._starts = [0, *starts] if self.turns else []
        sessions = [self.turns[i].session for i in self._starts]
        require(
            len(set(sessions)) == len(sessions),
            "turns",
            "one session in two places",
            "grouped by session",
            WorkloadError,
        )
        self._start_times = [self.turns[i].delay_s for i in self._starts]

    @property
    def in_order(self) -> bool:
        """Whether the sessions are in order of their beginnings."""
        return all(a <= b for a, b in pairwise(self._start_times))

    @property
    def waits_for_answers(self) -> bool:
        """Whether any request comes because of another that left."""
        return len(self._starts) < len(self.turns)

    @property
    def last_arrival_s(self) -> float:
        """When the last session begins, in seconds."""
        return max(self._start_times, default=0.0)

    def requests(self) -> Iterator[Request]:
        """Make the first request of every session, a few at a time: one by one between steps takes twice as long."""
        for first in range(0, len(self._starts), AHEAD):
            yield from [self._request(i, self.turns[i].delay_s, ()) for i in self._starts[first : first + AHEAD]]

    def on_finish(self, request: Request, now: float) -> list[Request]:
        """Make the request that follows one that left at `now` (seconds), if any.

        A conversation ends with a turn that failed, was aborted or rejected; a closed-loop client goes on.
        """
        index = request.request_id
        if not isinstance(index, int) or not 0 <= index < len(self.turns) - 1:
            return []
        turn, following = self.turns[index], self.turns[index + 1]
        if following.session != turn.session:
            return []
        if not following.keeps_context:
            return [self._request(index + 1, now + following.delay_s, ())]
        if request.finish_reason not in ("stop", "length") or not isinstance(request.prompt_token_ids, PromptTokens):
            return []
        context = (*request.prompt_token_ids.parts, tuple(request.output_token_ids))
        return [self._request(index + 1, now + following.delay_s, context)]

    def _request(self, index: int, at: float, context: tuple[Sequence[int], ...]) -> Request:
        turn = self.turns[index]
        client = turn.client
        asked = client.max_tokens
        stops = () if asked is None or asked == turn.output_tokens else (STOP_TOKEN,)
        return Request(
            index,
            PromptTokens((*context, *turn.prompt), self.vocab_size),
            _sampling(asked or turn.output_tokens, stops),
            arrival_time=at,
            client_id=client.client_id,
            priority=client.priority,
            ttft_target_s=client.ttft_target_s,
            tpot_target_s=client.tpot_target_s,
            expected_output_tokens=turn.output_tokens,
            cache_salt=client.cache_salt,
        )


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int, stops: tuple[int, ...]) -> SamplingParams:
    """Make what requests of equal length share."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stops)
