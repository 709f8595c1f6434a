"""Skips the planning of steps that can be told beforehand: while the same requests decode, a step is like the last.

    prompt arrives         decode  decode  decode     prompt arrives         decode  decode, somebody ends
    |----- planned -----|  |------ a stretch -----|   |----- planned -----|  |--------- a stretch --------|

Requests, pages, times, rows and the decision log come out as if every step had been planned. A step is planned if
somebody has arrived, may be admitted, computes more than a token, or needs a page that is not free.
"""

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate, takewhile

from contbatch.cost import SecondsOf, seconds_by_context
from contbatch.decision_log import DecisionLog
from contbatch.decoders import Decoders
from contbatch.policies.answers import reserve_of
from contbatch.recorder import Recorder
from contbatch.request import Request, RequestStatus
from contbatch.runners.simulated import SimulatedRunner, next_token, num_steps_alike
from contbatch.scheduler import Scheduler
from contbatch.shared_context import find_shared_context
from contbatch.start import find_start
from contbatch.step import DecodeSums, Grant, SchedulerOutput
from contbatch.step_shape import StepShape
from contbatch.stretch import Stretch, find_times

RUNNING, HELD = RequestStatus.RUNNING, RequestStatus.HELD
MOST_STEPS = 256
"""In a stretch with somebody carried: an arrival may end it long before that, and pages are counted beforehand."""
Takes = dict[int, list[Request]]
"""By number of the step in a stretch: who takes a page in it, in the order of the grants."""


class FastForward:
    """Finds stretches of steps that need no planning, and takes them.

    Parameters
    ----------
    scheduler : Scheduler
        Nothing is skipped unless its policy is `steady`.
    runner : SimulatedRunner
    """

    def __init__(self, scheduler: Scheduler, runner: SimulatedRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        most, pool = scheduler.max_model_len, scheduler.pool
        self._enough = pool.num_pages if most is None else pool.pages_for(most)  # pages, for whoever waits
        self._cost, self._seconds_of = runner.cost, dict[int, SecondsOf]()
        """By how many decode: seconds of a step by their context, as this cost model says."""
        own_pages = scheduler.pool.layout == "paged" and not scheduler.prefix_cache.enabled
        if own_pages and scheduler.policy.decodes != "among":
            scheduler.decoders = Decoders(scheduler, next_token, num_steps_alike)

    def run(
        self, now: float, next_arrival: float, recorder: Recorder, log: DecisionLog | None
    ) -> tuple[list[Request], float] | None:
        """Take the steps from `now` on that need no planning and begin before `next_arrival` (seconds).

        Returns
        -------
        tuple or None
            Those who left, all in the last of these steps, and when it ends; None if the next step must be planned.
        """
        scheduler = self.scheduler
        if (decoders := scheduler.decoders) is not None and log is None:
            decoders.on_land = recorder.land
            decoders.join()
            if decoders.carried:  # who is listed besides is not like them, and has its steps planned
                return None if scheduler.running else self._run_carried(decoders, now, next_arrival, recorder)
        if (step := self._next_step()) is None:
            return None
        decoding = [grant.request for grant in step.grants if grant.samples]
        takes = self._takes(decoding, most := self._most_steps(decoding))
        live_pages = self._live_pages([len(takes.get(nth, ())) for nth in range(most)])
        shape = StepShape.of(step.grants, shared_context=step.shared_context)
        seconds, resize_s = seconds_by_context(self.runner.cost, shape), self.runner.resize_seconds(shape.num_tokens)
        elapsed, ends = find_times(
            seconds, shape.decode_context, len(decoding), now, next_arrival, len(live_pages), resize_s
        )
        if not (num_steps := len(ends)):
            return None
        stretch = Stretch(now, elapsed, ends, live_pages[:num_steps])
        self.runner.num_rows = shape.num_tokens
        taken = self._take(takes, 0)
        recorder.begin_alike(step, scheduler, now)
        if log is None:
            taken += [page for nth in sorted(takes) if 0 < nth < num_steps for page in self._take(takes, nth)]
            self._advance(decoding, num_steps)
        else:
            taken += self._advance_logged(step, decoding, takes, stretch.starts, log)
        last = _later(step, num_steps - 1) if scheduler.prefix_cache.enabled else step
        left = scheduler.skip(last.grants, num_steps)
        recorder.end_alike(step, stretch, taken, left)
        if log is not None:
            log.end(left)
        return left, ends[-1]

    def _run_carried(
        self, decoders: Decoders, now: float, next_arrival: float, recorder: Recorder
    ) -> tuple[list[Request], float] | None:
        """Do the same if all who run are carried: see `run`."""
        scheduler, num_decoding = self.scheduler, len(decoders.carried)
        waiting, room = scheduler.waiting.requests, scheduler.max_num_batched_tokens - num_decoding
        if waiting and scheduler.free_seats and not self._is_refused(waiting[0], room):
            return None
        runner, first, context = self.runner, scheduler.num_steps, decoders.context
        seconds, most = self._seconds(num_decoding), min(decoders.next_end - first, MOST_STEPS)
        resize_s = runner.resize_seconds(num_decoding) if hasattr(runner.cost, "resize_s") else 0.0
        elapsed, ends = find_times(seconds, context, num_decoding, now, next_arrival, most, resize_s)
        if not (ends and (live_pages := decoders.take_pages(len(ends)))):
            return None
        if (num_steps := len(live_pages)) < len(ends):
            del elapsed[num_steps:], ends[num_steps:]
        runner.num_rows = num_decoding
        if decoders.joined:
            recorder.begin_carried(decoders.joined, first, now)
        counts = num_decoding, context, len(waiting), bool(waiting) and not scheduler.free_seats
        left = scheduler.skip((), num_steps)
        recorder.end_carried(first, Stretch(now, elapsed, ends, live_pages), counts, left)
        return left, ends[-1]

    # ---- the plan of the next step -------------------------------------------------------------------------------

    def _next_step(self) -> SchedulerOutput | None:
        """Plan the next step as `Planner` would; None unless each grant is certain to be of one token, nobody new."""
        scheduler, step = self.scheduler, SchedulerOutput(self.scheduler.num_steps)
        budget, refused = scheduler.max_num_batched_tokens, list[Request]()
        if not scheduler.policy.steady or not scheduler.running:
            return None
        admissible = takewhile(lambda _: not refused, scheduler.waiting)
        for item in scheduler.policy.plan(admissible, tuple(scheduler.running), budget):
            request, wanted = item
            full, running = step.num_tokens == budget, request.status in (RUNNING, HELD)
            if full and running:
                step.bound.add("tokens")
                break
            if not full:
                step.plan.append(item)
            if running:
                if wanted > 1 or request.num_computed_tokens < request.num_prompt_tokens:
                    return None
                padding = request.status is HELD
                start = request.num_computed_tokens - padding
                step.grants.append(Grant(request, start, 1, not padding, padding))
                step.num_tokens += 1
            elif not refused:
                made_way_for = scheduler.policy.make_way(request, tuple(scheduler.running))
                if made_way_for or not self._is_refused(request, min(wanted, budget - step.num_tokens)):
                    return None
                refused.append(request)
                if not full:
                    step.bound.add("pages" if scheduler.free_seats else "seats")
        step.shared_context = find_shared_context(step.grants, scheduler.pool)
        return step if any(grant.samples for grant in step.grants) else None

    def _is_refused(self, newcomer: Request, tokens: int) -> bool:
        """Whether a waiting request finds no seat or too few pages, now and as long as nobody gives any back.

        It would get `tokens` at most. Nobody makes way for it: the policy has said so, or promised (`Policy.decodes`).
        """
        scheduler, pool = self.scheduler, self.scheduler.pool
        available = pool.num_available
        if not scheduler.free_seats or not available:
            return True
        if available >= self._enough:
            return False
        reserve, num_tokens = reserve_of(scheduler.policy, newcomer), newcomer.num_tokens
        if pool.pages_for(max(reserve, num_tokens)) <= available:
            return False
        computed, shared, _, _ = find_start(newcomer, scheduler.prefix_cache)
        need = pool.pages_for(max(reserve, min(computed + tokens, num_tokens))) - len(shared)
        return need > available - pool.count_cached(shared)

    # ---- how far the stretch goes --------------------------------------------------------------------------------

    def _most_steps(self, decoding: list[Request]) -> int:
        """Count the steps until somebody ends or, since pages are published then, fills a page."""
        scheduler, size = self.scheduler, self.scheduler.pool.page_size
        most = min(map(num_steps_alike, decoding))
        # Everybody takes a page each `size` steps: a bound that costs nothing, before times are worked out.
        most = min(most, size * (scheduler.pool.num_free // len(decoding) + 1))
        if scheduler.prefix_cache.enabled:
            most = min(most, *(size - request.num_computed_tokens % size for request in decoding))
        return most

    def _seconds(self, num_decoding: int) -> SecondsOf:
        """Return the seconds of a step in which so many decode and nobody else computes, by their context."""
        if self._cost is not self.runner.cost:
            self._cost, self._seconds_of = self.runner.cost, {}
        if num_decoding not in self._seconds_of:
            shape = StepShape.of((), DecodeSums(num_decoding))
            self._seconds_of[num_decoding] = seconds_by_context(self._cost, shape)
        return self._seconds_of[num_decoding]

    def _live_pages(self, takes: list[int]) -> list[int]:
        """Return the live pages after each step that takes so many, up to the first that does not find all free.

        A contiguous run may not grow just because some are.
        """
        pool = self.scheduler.pool
        free = pool.num_free
        now = pool.num_pages - pool.num_cached - free
        live = list(accumulate(takes, initial=now))
        return live[1 : bisect_right(live, now + (free if pool.layout == "paged" else 0))]

    def _takes(self, decoding: list[Request], num_steps: int) -> Takes:
        """Return who needs a page in which of the steps."""
        size, takes = self.scheduler.pool.page_size, defaultdict[int, list[Request]](list)
        for request in decoding:
            room = len(request.pages) * size - request.num_computed_tokens
            for nth in range(room, num_steps, size):
                takes[nth].append(request)
        return takes

    # ---- taking it -----------------------------------------------------------------------------------------------

    def _take(self, takes: Takes, nth: int) -> list[tuple[int, Request, int]]:
        """Take the pages of a step; return it, and who has how many now."""
        for request in takes.get(nth, ()):
            self.scheduler.pool.grow(request.pages, 1)
        return [(nth, request, len(request.pages)) for request in takes.get(nth, ())]

    def _advance(self, decoding: list[Request], num_steps: int) -> None:
        """Have everybody make that many tokens."""
        for request in decoding:
            request.output_token_ids += [next_token(request)] * (num_steps - 1)
            request.take(next_token(request))
            request.num_computed_tokens += num_steps

    def _advance_logged(
        self, step: SchedulerOutput, decoding: list[Request], takes: Takes, starts: list[float], log: DecisionLog
    ) -> list[tuple[int, Request, int]]:
        """Do the same step by step, and tell the log of each."""
        taken = []
        for nth, start in enumerate(starts):
            if nth:
                taken += self._take(takes, nth)
            log.begin(_later(step, nth), self.scheduler, start)
            self._advance(decoding, 1)
        return taken


def _later(step: SchedulerOutput, num_steps: int) -> SchedulerOutput:
    """Return the step that is like this one, so many steps later."""
    grants = [
        Grant(request, start if padding else start + num_steps, 1, samples, padding)
        for request, start, _, samples, padding in step.grants
    ]
    return SchedulerOutput(step.step + num_steps, grants, plan=step.plan, bound=step.bound, num_tokens=step.num_tokens)
