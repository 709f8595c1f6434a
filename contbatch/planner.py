"""One step in the making: a policy's plan, followed as far as budget, seats and pages allow."""

from collections.abc import Iterable, Iterator
from heapq import heappop
from typing import TYPE_CHECKING

from contbatch.errors import PolicyError
from contbatch.policies import Plan
from contbatch.policies.answers import rank_of, reserve_of, victim_of
from contbatch.request import Request, RequestStatus
from contbatch.step import Grant, SchedulerOutput

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

RUNNING, PREEMPTED, HELD = RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.HELD


class Planner:
    """Turns the plan of a scheduler's policy into grants, admissions and preemptions.

    Three rules keep every workload going. A step admits or preempts, never both, unless the policy makes running
    requests give way to a newcomer. Whoever the plan names first is served
    first: it may take the pages of those ranked below, so it always gets on. And an admission leaves the running the
    pages they need for a token each, so newcomers never starve them.
    """

    def __init__(self, scheduler: "Scheduler", step: SchedulerOutput) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.budget = scheduler.max_num_batched_tokens
        self.step = step
        self.admitting = True
        self.seen: set[int | str] = set()

    def run(self, now: float) -> None:
        """Fill the step, which starts at `now` (seconds)."""
        scheduler, step = self.scheduler, self.step
        object.__setattr__(scheduler.policy, "now", now)  # the ready policies are frozen
        evictions = self.pool.num_evictions
        plan = self._checked(scheduler.policy.plan(self._admissible(), tuple(scheduler.running), self.budget))
        while step.num_tokens < self.budget and (item := next(plan, None)) is not None:
            step.plan.append(item)
            request, wanted = item
            tokens = min(wanted, self.budget - step.num_tokens)
            if request.status is RUNNING:
                if self._has_room(request, tokens):
                    self._grant(request, tokens)
                elif not step.admitted:  # else it sits this step out, rather than preempt for those who just came
                    plan = self._preempt_for(request, tokens, plan)
            elif request.status is HELD:
                self._pad(request)
            elif self.admitting and request not in step.preempted:
                self._admit(request, tokens)
                self._make_way(request, tokens)
        if step.num_tokens >= self.budget:
            self._note_budget(plan)
        step.num_evictions = self.pool.num_evictions - evictions

    def _admissible(self) -> Iterator[Request]:
        """Yield the waiting, ending once no more can be admitted: a long queue costs a step nothing."""
        for request in self.scheduler.waiting:
            if not self.admitting:
                return
            yield request

    def _checked(self, plan: Plan) -> Plan:
        name, requests = f"{type(self.scheduler.policy).__name__}.plan", self.scheduler.requests
        if not isinstance(plan, Iterable):
            raise PolicyError(f"{name} must yield (request, number of tokens), but returned {plan!r}")
        for item in plan:
            try:
                request, wanted = item
                known = requests.get(request.request_id) is request
            except (TypeError, ValueError, AttributeError):
                raise PolicyError(f"{name} must yield (request, number of tokens), got {item!r}") from None
            if not known:
                raise PolicyError(f"{name} yielded {request!r}, which is not a live request of this scheduler")
            if request.request_id in self.seen:
                raise PolicyError(f"{name} yielded request {request.request_id!r} twice in one step")
            limit = request.num_uncomputed_tokens
            if not isinstance(wanted, int) or not 1 <= wanted <= limit:
                raise PolicyError(
                    f"{name} wants {wanted!r} tokens for request {request.request_id!r}, possible are 1 to {limit}"
                )
            self.seen.add(request.request_id)
            yield request, wanted

    def _grant(self, request: Request, tokens: int) -> None:
        samples = tokens == request.num_uncomputed_tokens
        self.step.grants.append(Grant(request, request.num_computed_tokens, tokens, samples, padding=False))
        self.step.num_tokens += tokens

    def _pad(self, request: Request) -> None:
        """Compute the last token in pages again, for nothing: what a finished row of a padded batch costs."""
        self.step.grants.append(Grant(request, request.num_computed_tokens - 1, 1, samples=False, padding=True))
        self.step.num_tokens += 1

    def _admit(self, request: Request, tokens: int) -> None:
        """Give a seat and pages; whoever does not fit ends the admission of this step, so nobody overtakes it."""
        scheduler, pool = self.scheduler, self.pool
        shared, need, limits = self._fit(request, tokens)
        if limits:
            self.admitting = False
            self.step.bound.update(limits)
            return
        cached = len(shared) * pool.page_size
        pool.share(shared)  # before others are taken, which may evict them
        request.pages = shared + pool.take(need)
        request.num_computed_tokens = cached
        request.seat = heappop(scheduler.free_seats)
        request.status = RUNNING
        self.step.admitted.append(request)
        self.step.num_cached_tokens += cached
        scheduler.prefix_cache.count(request)
        self._grant(request, min(tokens, request.num_tokens - cached))

    def _fit(self, request: Request, tokens: int) -> tuple[list[int], int, tuple[str, ...]]:
        """Return the cached pages that a newcomer finds, how many more it needs, and the limits that refuse them."""
        scheduler, pool = self.scheduler, self.pool
        if not scheduler.free_seats or not pool.num_available:
            return [], 0, ("pages" if scheduler.free_seats else "seats",)
        shared = scheduler.prefix_cache.find(request)
        stored = min(len(shared) * pool.page_size + tokens, request.num_tokens)
        need = pool.pages_for(max(reserve_of(scheduler.policy, request), stored)) - len(shared)
        left = pool.num_available - need - pool.count_cached(shared)
        if left < 0 or (left < len(scheduler.running) and left < self._owed()):
            return shared, need, ("pages",)
        return shared, need, () if pool.can_take(need) else ("pages", "fragmentation")

    def _note_budget(self, rest: Plan) -> None:
        """Note whether the budget, now used up, is what kept more of the plan out."""
        request, wanted = self.step.plan[-1]
        grant = self.step.grants[-1]
        cut = grant.request is request and grant.num_tokens < min(wanted, request.num_uncomputed_tokens)
        if cut or any(self._would_go_on(r) for r, _ in rest):
            self.step.bound.add("tokens")

    def _would_go_on(self, request: Request) -> bool:
        """Whether the step, had it any budget left, would turn to a request that the plan names."""
        if request.status in (RUNNING, HELD):
            return True
        if self.admitting and request not in self.step.preempted:
            self.admitting = not self._fit(request, 1)[-1]
            return self.admitting
        return False

    def _make_way(self, newcomer: Request, tokens: int) -> None:
        """Admit a newcomer that did not fit in the place of those who give way to it, if that frees enough pages."""
        if self.admitting:
            return
        policy, running = self.scheduler.policy, tuple(self.scheduler.running)
        named = policy.make_way(newcomer, running)
        if foreign := [r for r in named if r not in running]:
            raise PolicyError(f"{type(policy).__name__}.make_way named {foreign[0]!r}, which does not run here")
        victims = [r for r in named if r.status is RUNNING and r.request_id not in self.seen]
        need = self.pool.pages_for(max(reserve_of(policy, newcomer), tokens))
        held = sum(self.pool.count_exclusive(r.pages) for r in victims)
        if need - len(self.scheduler.prefix_cache.find(newcomer)) > self.pool.num_available + held:
            return
        while victims and newcomer.status is not RUNNING:
            victims.remove(victim := victim_of(policy, tuple(victims)))
            self._preempt(victim)
            self.admitting = True
            self._admit(newcomer, tokens)

    def _has_room(self, request: Request, tokens: int) -> bool:
        """Take the pages that `tokens` more tokens need; False if too few are free."""
        need = self.pool.pages_for(request.num_computed_tokens + tokens) - len(request.pages)
        if need <= 0 or self.pool.grow(request.pages, need):
            return True
        self.step.bound.add("pages")
        return self._restart(request)

    def _restart(self, request: Request) -> bool:
        """Compute a request again, in a run for all it may need, if memory is contiguous and there is such a run."""
        if not self.pool.move(request.pages, self.pool.pages_for(request.max_kv_tokens)):
            return False
        request.num_computed_tokens = 0
        self.step.restarted.append(request)
        return True

    def _owed(self) -> int:
        """Pages that the running still to be served need for a token each."""
        to_come = (r for r in self.scheduler.running if r.status is RUNNING and r.request_id not in self.seen)
        return sum(self.pool.pages_for(r.num_computed_tokens + 1) > len(r.pages) for r in to_come)

    def _preempt_for(self, request: Request, tokens: int, plan: Plan) -> Plan:
        """Preempt those that the policy chooses until `request` has room; return the rest of the plan.

        Those the plan does not name rank lowest, the latest admitted of them last. Whoever it has named already ranks
        above `request` and is left alone: if that frees too little, `request` keeps its pages and sits this step out.
        """
        self.admitting = False
        rest = list(plan)
        rank = {planned.request_id: place for place, (planned, _) in enumerate(rest)}
        victims = [
            r
            for r in self.scheduler.running
            if r.status is RUNNING and (r.request_id in rank or r.request_id not in self.seen)
        ]
        victims.sort(key=lambda r: rank.get(r.request_id, len(rank)))
        has_room = False
        while victims and not has_room:
            victims.remove(victim := victim_of(self.scheduler.policy, tuple(victims)))
            self._preempt(victim)
            has_room = self._has_room(request, tokens)
        if has_room:
            self._grant(request, tokens)
        return iter(rest)

    def _preempt(self, victim: Request) -> None:
        victim.rank = rank_of(self.scheduler.policy, victim)  # first: if it raises, nothing has changed
        self.scheduler.vacate(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = PREEMPTED
        self.step.preempted.append(victim)
