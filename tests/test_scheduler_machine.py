"""Adding, forking, stepping, aborting, interrupting and failing in any order, in either layout, with a log of it."""

import pytest
from fake_runner import VOCABULARY, scheduler_of, solo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check
from random_workloads import ARRIVALS, LIMITS, POLICIES, PROMPTS, SALTS, SEVERAL, Workload, make

from contbatch.decision_log import DecisionLog
from contbatch.errors import InvalidRequestError
from contbatch.request import Request, RequestStatus
from contbatch.sampling_params import SamplingParams


class Interrupt(BaseException):
    """Ctrl-C."""


def state_of(scheduler):
    """What a replayed `State` says of a scheduler."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    return (
        {r.seat: r.request_id for r in running},
        {r.request_id: tuple(r.pages) for r in running},
        {r.request_id: r.num_computed_tokens for r in running},
        tuple(r.request_id for r in waiting),
        {r.request_id: tuple(r.host_pages) for r in waiting if r.status is RequestStatus.SWAPPED},
        frozenset(scheduler.pool.cached_pages),
        scheduler.pool.num_free,
    )


def replayed(log):
    return [(s.seats, s.tables, s.computed, s.waiting, s.host_tables, s.cached, len(s.free)) for s in log.states()]


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, pages and seats add up, and those left alone get the tokens that they would get alone."""

    @initialize(limits=LIMITS, policy=POLICIES, layout=st.sampled_from(["paged", "contiguous"]))
    def start(self, limits, policy, layout):
        limits = {**limits, "layout": layout, "prefix_cache": limits["prefix_cache"] and layout == "paged"}
        self.limits, self.scheduler = limits, scheduler_of(policy, **limits)
        self.requests, self.disturbed, self.in_callback, self.num_prompts = {}, set(), {}, 0
        self.log, self.states = DecisionLog(), []

    def plan(self):
        step = self.scheduler.schedule()
        self.log.begin(step, self.scheduler, 0.0)
        self.states.append(state_of(self.scheduler))
        return step

    def serve(self, steps):
        for _ in range(steps):
            if not self.scheduler.has_requests:
                break
            step = self.plan()
            result = self.scheduler.runner.execute(step)
            try:
                left = self.scheduler.update(step, result.tokens, result.errors, self.on_token)
            except Interrupt:
                self.log.end(self.scheduler.drain_released())
                raise
            self.log.end(left)

    def live(self):
        return st.sampled_from(sorted(self.scheduler.requests, key=str))

    def on_token(self, request):
        action = self.in_callback.pop(request.request_id, None)
        if action == "abort all":
            for name in list(self.scheduler.requests):
                self.disturbed.add(name)
                self.scheduler.abort(name)
        elif action == "abort and raise":
            self.scheduler.abort(request.request_id)
        elif action == "interrupt":
            raise Interrupt
        if action in ("raise", "abort and raise"):
            raise KeyError(request.request_id)
        return action == "stop"

    @rule(prompt=PROMPTS, sampling=SEVERAL, arrival=ARRIVALS, salt=SALTS)
    def add(self, prompt, sampling, arrival, salt):
        self.num_prompts += 1
        request = make(self.num_prompts, prompt, sampling, arrival, salt)
        if Workload(self.limits, []).fits(request):
            self.scheduler.add(request)
            self.requests |= {r.request_id: r for r in request.samples}
        else:
            with pytest.raises(InvalidRequestError, match="can never run"):
                self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), token=st.integers(0, VOCABULARY - 1), output=st.integers(1, 5))
    def fork(self, data, token, output):
        parent = self.requests[data.draw(self.live())]
        self.num_prompts += 1
        tokens = [*parent.token_ids(0, max(1, parent.num_computed_tokens)), token]
        child = Request(self.num_prompts, tokens, SamplingParams(max_tokens=output), cache_salt=parent.cache_salt)
        if Workload(self.limits, []).fits(child):
            self.scheduler.fork(parent, child)
            self.requests[child.request_id] = child

    @precondition(lambda self: self.scheduler.requests)
    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        try:
            self.serve(steps)
        except Interrupt:
            self.plan()

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def plan_and_be_interrupted(self):
        self.plan()

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def crash_half_way(self):
        runner = self.scheduler.runner
        runner.crash = {runner.calls}
        with pytest.raises(RuntimeError, match="crashed"):
            self.serve(1)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(self.live())
        ended = [r for r in self.requests[name].samples if r.request_id in self.scheduler.requests]
        self.disturbed |= {r.request_id for r in ended}
        self.scheduler.abort(name)
        self.log.end(self.scheduler.drain_released())
        assert [r.finish_reason for r in ended] == ["abort"] * len(ended)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def poison(self, data):
        name = data.draw(self.live())
        self.disturbed.add(name)
        self.scheduler.runner.poison[name] = self.requests[name].num_output_tokens

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), action=st.sampled_from(["raise", "stop", "abort all", "abort and raise", "interrupt"]))
    def set_callback(self, data, action):
        name = data.draw(self.live())
        self.in_callback[name] = action
        if action != "interrupt":
            self.disturbed |= {r.request_id for r in self.requests[name].samples}

    @invariant()
    def everything_adds_up(self):
        check(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.in_callback = {}
        self.serve(20 + 8 * sum(r.num_prompt_tokens + 9 for r in self.requests.values()))
        assert not self.scheduler.has_requests
        assert replayed(self.log) == self.states
        assert self.scheduler.pool.num_available == self.limits["num_pages"]
        assert self.scheduler.swap_space.num_free == self.limits["num_host_pages"]
        assert {r.request_id for r in self.scheduler.ended} == self.requests.keys()
        for name, request in self.requests.items():
            tokens, reason = solo(request)
            assert (request.finish_reason == "error") == (request.error is not None)
            if name in self.disturbed:
                assert request.output_token_ids == tokens[: request.num_output_tokens]
            else:
                assert (request.output_token_ids, request.finish_reason) == (tokens, reason)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30)
