"""When tokens are due."""

from math import inf

from contbatch.request import Request


class Deadlines:
    """When the next token of each request is due, in seconds on the engine's clock; infinity without a target.

    The first is due `ttft_target_s` after arrival, the k-th after it k · `tpot_target_s` after the first was made.
    """

    def __init__(self) -> None:
        self._first_s: dict[Request, float] = {}

    def of(self, request: Request, now: float) -> float:
        """Return when the next token is due; its first was made at `now` if it is seen here for the first time."""
        if request.output_token_ids:
            pace = inf if request.tpot_target_s is None else request.tpot_target_s
            return self._first_s.setdefault(request, now) + pace * request.num_output_tokens
        return request.arrival_time + (inf if request.ttft_target_s is None else request.ttft_target_s)

    def forget_finished(self) -> None:
        """Drop what is known of requests that have ended."""
        for ended in [r for r in self._first_s if r.is_finished]:
            del self._first_s[ended]
