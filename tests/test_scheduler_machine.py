"""Adding, stepping, aborting, interrupting and failing in any order."""

import pytest
from fake_runner import scheduler_of, serve, solo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check
from random_workloads import ARRIVALS, LIMITS, POLICIES, PROMPTS, SALTS, SEVERAL, Workload, make

from contbatch.errors import InvalidRequestError


class Interrupt(BaseException):
    """Ctrl-C."""


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, pages and seats add up, and those left alone get the tokens that they would get alone."""

    @initialize(limits=LIMITS, policy=POLICIES)
    def start(self, limits, policy):
        self.limits, self.scheduler = limits, scheduler_of(policy, **limits)
        self.requests, self.disturbed, self.in_callback, self.num_prompts = {}, set(), {}, 0

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
    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        try:
            serve(self.scheduler, steps, self.on_token)
        except Interrupt:
            self.scheduler.schedule()

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def plan_and_be_interrupted(self):
        self.scheduler.schedule()

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def crash_half_way(self):
        runner = self.scheduler.runner
        runner.crash = {runner.calls}
        with pytest.raises(RuntimeError, match="crashed"):
            serve(self.scheduler, 1)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(self.live())
        ended = [r for r in self.requests[name].samples if r.request_id in self.scheduler.requests]
        self.disturbed |= {r.request_id for r in ended}
        self.scheduler.abort(name)
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
        serve(self.scheduler, max_steps=20 + 8 * sum(r.num_prompt_tokens + 9 for r in self.requests.values()))
        self.scheduler.drain_released()
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
