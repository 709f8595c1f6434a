"""One step in the making: a policy's plan, followed as far as budget, seats and pages allow."""

from collections.abc import Iterator
from heapq import heappop
from typing import TYPE_CHECKING

from contbatch.errors import PolicyError
from contbatch.policies import Plan
from contbatch.policies.answers import planned, rank_of, reserve_of, victim_of
from contbatch.request import Request, RequestStatus
from contbatch.samples import unforked
from contbatch.start import NOWHERE, Start, find_start
from contbatch.step import Grant, PageMove, SchedulerOutput

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

RUNNING, PREEMPTED, HELD = RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.HELD
SWAPPED, FORKING = RequestStatus.SWAPPED, RequestStatus.FORKING


class Planner:
    """Follows the plan of a scheduler's policy, item by item, into grants, admissions, preemptions and page moves.

    Three rules keep every workload going. A step admits or preempts, never both, unless the policy makes running
    requests give way to a newcomer. Whoever the plan names first is served first: it may take the pages of those ranked
    below, so it always gets on, at the latest in the next step if others were just admitted. And an admission leaves as
    many pages as the running need for a token each, so newcomers never starve them; in contiguous memory these may lie
    apart, and who can't grow then begins again elsewhere or preempts.
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
        scheduler, step, policy = self.scheduler, self.step, self.scheduler.policy
        object.__setattr__(policy, "now", now)  # the ready policies are frozen
        evictions = self.pool.num_evictions
        if (decoders := scheduler.decoders) is not None and decoders.carried:
            step.decoders = decoders.begin_step()
            self.budget -= step.decoders.num_requests
        try:
            self._follow(policy.plan(self._admissible(), tuple(scheduler.running), self.budget))
        finally:  # whatever a policy raises, those admitted or preempted so far change sides
            if step.admitted:
                scheduler.waiting.remove(step.admitted)
                scheduler.running += step.admitted
            if step.preempted:
                scheduler.running = [r for r in scheduler.running if r.seat is not None]
                for request in step.preempted:
                    scheduler.waiting.add(request)
        step.num_evictions = self.pool.num_evictions - evictions

    def _follow(self, plan: Plan) -> None:
        scheduler, step, budget = self.scheduler, self.step, self.budget
        plan = planned(scheduler.policy, plan, scheduler.requests, self.seen, step.restarted)
        while step.num_tokens < budget and (item := next(plan, None)) is not None:
            step.plan.append(item)
            request, wanted = item
            tokens = min(wanted, budget - step.num_tokens)
            if request.status is RUNNING:
                if self._has_room(request, tokens):
                    self._grant(request, tokens)
                elif not step.admitted:  # else it sits this step out, rather than preempt for those who just came
                    plan = self._preempt_for(request, tokens, plan)
            elif request.status is HELD:
                self._pad(request)
            elif self.admitting and request not in step.preempted and not self._admit(request, tokens):
                self._make_way(request, tokens)
        if step.num_tokens >= budget:
            self._note_budget(plan)

    def _admissible(self) -> Iterator[Request]:
        """Yield the waiting, ending once no more can be admitted: a long queue costs a step nothing."""
        for request in self.scheduler.waiting.requests:
            if not self.admitting:
                return
            yield request

    def _grant(self, request: Request, tokens: int) -> None:
        samples = tokens == request.num_uncomputed_tokens
        self.step.grants.append(Grant(request, request.num_computed_tokens, tokens, samples, False))
        self.step.num_tokens += tokens
        if samples and request.children:
            self.step.forked += unforked(request)

    def _pad(self, request: Request) -> None:
        """Compute the last token in pages again, for nothing: what a finished row of a padded batch costs."""
        self.step.grants.append(Grant(request, request.num_computed_tokens - 1, 1, samples=False, padding=True))
        self.step.num_tokens += 1

    # ---- the waiting -------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, tokens: int) -> bool:
        """Give a seat and pages; whoever does not fit ends the admission of this step, so nobody overtakes it."""
        scheduler, pool = self.scheduler, self.pool
        (computed, shared, cached, partial), stop, need, limits = self._fit(request, tokens)
        if limits:
            self.admitting = False
            self.step.bound.update(limits)
            return False
        if shared:
            pool.share(shared)  # before others are taken, which may evict them
        request.pages = shared + pool.take(need)
        if computed > cached:
            self._move_in(request, len(shared), partial)
        if request.host_pages:
            scheduler.swap_space.give_back(request.host_pages)
        request.num_computed_tokens = computed
        request.seat = heappop(scheduler.free_seats)
        request.status = RUNNING
        self.step.admitted.append(request)
        self.step.num_cached_tokens += cached
        scheduler.prefix_cache.count(request, cached)
        self._grant(request, stop - computed)
        return True

    def _fit(self, request: Request, tokens: int) -> tuple[Start, int, int, tuple[str, ...]]:
        """Return from where a newcomer goes on, to where, how many more pages it needs, and what refuses them."""
        scheduler, pool = self.scheduler, self.pool
        if not scheduler.free_seats or not (available := pool.num_available):
            return NOWHERE, 0, 0, ("pages" if scheduler.free_seats else "seats",)
        start = computed, shared, _, _ = find_start(request, scheduler.prefix_cache)
        stop = min(computed + tokens, request.num_tokens)
        need = pool.pages_for(max(reserve_of(scheduler.policy, request), stop)) - len(shared)
        left = available - need - (pool.count_cached(shared) if shared else 0)
        if left < 0 or (left < len(scheduler.running) and left < self._owed()):
            return start, stop, need, ("pages",)
        return start, stop, need, () if pool.layout == "paged" or pool.can_take(need) else ("pages", "fragmentation")

    def _owed(self) -> int:
        """Pages that the running still to be served need for a token each."""
        to_come = (r for r in self.scheduler.running if r.status is RUNNING and r.request_id not in self.seen)
        return sum(self.pool.pages_for(r.num_computed_tokens + 1) > len(r.pages) for r in to_come)

    def _move_in(self, request: Request, first: int, partial: int | None) -> None:
        """Have the pages from place `first` on filled, which a request just admitted does not share with others."""
        if partial is not None:
            self.step.moves.append(PageMove("copy", partial, request.pages[first]))
        back = zip(request.host_pages[first:], request.pages[first:], strict=False)
        self.step.moves += [PageMove("in", host, page) for host, page in back]
        self.step.moved.append(request)

    def _make_way(self, newcomer: Request, tokens: int) -> None:
        """Admit a newcomer that did not fit in the place of those who give way to it, if that frees enough pages."""
        policy, running = self.scheduler.policy, tuple(self.scheduler.running)
        named = policy.make_way(newcomer, running)
        if not named:
            return
        if foreign := [r for r in named if r not in running]:
            raise PolicyError(f"{type(policy).__name__}.make_way named {foreign[0]!r}, which does not run here")
        victims = [r for r in named if r.status is RUNNING and r.request_id not in self.seen]
        shared = self.scheduler.prefix_cache.find(newcomer)  # and no pages of its kin, who may be among the victims
        start = max(newcomer.num_computed_tokens, len(shared) * self.pool.page_size)
        stop = min(start + tokens, newcomer.num_tokens)
        need = self.pool.pages_for(max(reserve_of(policy, newcomer), stop)) - len(shared)
        held = self.pool.count_exclusive(page for r in victims for page in r.pages)
        if need > self.pool.num_available + held:
            return
        while victims and newcomer.status is not RUNNING:
            victims.remove(victim := victim_of(policy, tuple(victims)))
            self._preempt(victim)
            self.admitting = True
            self._admit(newcomer, tokens)

    # ---- the running that need pages ---------------------------------------------------------------------------------

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
        """Take seat and pages; their content goes to host memory if the policy agrees and it has room."""
        scheduler, step = self.scheduler, self.step
        victim.rank = rank_of(scheduler.policy, victim)  # first: if it raises, nothing has changed
        computed = victim.pages[: self.pool.pages_for(victim.num_computed_tokens)]
        host_pages = scheduler.swap_space.take(len(computed)) if scheduler.policy.may_swap(victim) else []
        scheduler.vacate(victim)
        victim.num_preemptions += 1
        step.preempted.append(victim)
        if host_pages:
            step.moves += [PageMove("out", page, host) for page, host in zip(computed, host_pages, strict=True)]
            step.moved.append(victim)
            victim.host_pages, victim.status = host_pages, SWAPPED
            victim.num_swaps += 1
        else:
            victim.num_computed_tokens, victim.status = 0, PREEMPTED

    # ---- which limits were binding -----------------------------------------------------------------------------------

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
