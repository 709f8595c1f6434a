"""Ctrl-C at any line of a simulated run: it ends as an interrupt, what was done is there, and the engine goes on."""

import signal
from pathlib import Path

import pytest
from tracing import run_traced

import contbatch as cb
from contbatch.simulation import simulated_engine

PACKAGE = str(Path(cb.__file__).parent)
LIMITS = {"num_pages": 9, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16}
COST = cb.Linear(step_s=0.01, token_s=0.001, resize_s=0.003, swapped_token_s=0.001)
TRIED = 60
"""Lines of each run at which it is interrupted, from one end to the other."""


class InterruptAt:
    """A trace function that sends the process an interrupt before the k-th line of this package that it runs."""

    def __init__(self, line):
        self.line, self.num_lines, self.where = line, 0, None

    def __call__(self, frame, event, _):
        if event == "call" and not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.line:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self


def requests_of(name, n, at=0.0):
    """Five requests, of which the last can never run."""
    return [
        cb.Request(
            f"{name}{i}",
            [1] * (100 if i == 4 else 5 + i),
            cb.SamplingParams(max_tokens=6 + i, n=n if i == 1 else 1),
            arrival_time=at + 0.02 * (i // 2),
            priority=-i,
        )
        for i in range(5)
    ]


@pytest.mark.parametrize(
    ("policy", "n", "in_order", "limits"),
    [
        (cb.ChunkedPrefill(), 1, True, {}),
        (cb.ChunkedPrefill(), 2, False, {"detail": False}),
        (cb.Priority(preempt=True), 1, False, {"prefix_cache": True}),
        (cb.ContinuousBatching(), 1, False, {"num_host_pages": 20}),
    ],
)
def test_an_interrupt_at_any_line_loses_nothing(policy, n, in_order, limits):
    def new_engine():
        return simulated_engine(policy, cb.Simulated(cost=COST), **LIMITS, **limits)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    new_engine().run(requests_of("a", n))  # loads what is loaded on use
    count, engine, requests = InterruptAt(0), new_engine(), requests_of("a", n)
    run_traced(count, lambda: engine.run(requests, in_order=in_order))
    for nth in range(TRIED):
        trace, engine, requests = InterruptAt(1 + nth * count.num_lines // TRIED), new_engine(), requests_of("a", n)
        with pytest.raises(KeyboardInterrupt):
            run_traced(trace, lambda run=engine.run, given=requests: run(given, in_order=in_order))
        scheduler, where = engine.scheduler, trace.where
        scheduler.pool.check()
        assert (engine.has_requests, scheduler.pool.num_available) == (False, LIMITS["num_pages"]), where
        assert sorted(scheduler.free_seats) == [0, 1, 2], where
        rows = engine.recorder.result().requests.set_index("request_id")
        assert rows.index.is_unique, where
        for request in requests:
            assert (request.request_id in rows.index) == (request.finish_reason is not None), where
            if request.finish_reason is not None:
                assert rows.output_tokens[request.request_id] == request.num_output_tokens, where
        following = requests_of("b", n, engine.now)
        assert len(engine.run(following).requests) == 4 + n, where
        assert [r.finish_reason for r in following] == ["length"] * 4 + ["rejected"], where
        scheduler.pool.check()
        assert scheduler.pool.num_available == LIMITS["num_pages"], where
