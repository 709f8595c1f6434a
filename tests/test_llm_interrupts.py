"""Interrupts, finalizers, threads and memory of the facade, on a tiny random model."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from tiny_llm import greedy, ran, tokens_of, write_tiny
from tracing import do_at, lines_of, raise_at

import contbatch as cb
from contbatch.errors import RunnerError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with cb.LLM(folder, num_pages=32, max_num_seqs=4) as llm:
        yield llm
        assert llm.num_free_pages == 32


@pytest.mark.parametrize(("others", "again_after"), [(False, 0), (False, 1), (False, 9), (True, 0)])
def test_an_interrupt_at_any_line(llm, others, again_after):
    """Ctrl-C is never swallowed nor turned into another error, frees the pages and spares the streams of others.

    Pressed again within a step it does not wait for the scheduler to end its work. If it hits the cleaning up after the
    first, requests go on with whatever comes next.
    """
    expected, text = tokens_of(llm), "".join(llm.stream([8, 9, 10], greedy(12)))
    lines = lines_of(lambda: tokens_of(llm))
    assert lines > 1000
    for line in range(1, lines - 50, lines // 40):
        stream = llm.stream([8, 9, 10], greedy(12)) if others else None
        begun = next(stream) if others else ""
        with pytest.raises(KeyboardInterrupt):
            raise_at(line, lambda: tokens_of(llm), again_after)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if others:
            assert begun + "".join(stream) == text
        assert llm.num_free_pages == 32 or again_after
        assert tokens_of(llm) == expected
        assert llm.num_free_pages == 32


def test_a_stream_may_be_dropped_at_any_line(llm):
    """As a garbage collection does, in the middle of the engine's own work."""
    expected, text = tokens_of(llm), "".join(llm.stream([8, 9, 10], greedy(12)))
    lines = lines_of(lambda: tokens_of(llm))
    for line in range(1, lines - 50, lines // 40):
        dropped, kept = [llm.stream([4, 5, 6], greedy(12))], llm.stream([8, 9, 10], greedy(12))
        begun = next(kept)
        assert do_at(line, dropped.clear, lambda: tokens_of(llm)) == expected
        assert dropped == []
        begun += next(kept) + next(kept)  # what it has, then a step
        assert llm.num_free_pages == 31
        assert begun + "".join(kept) == text
        assert llm.num_free_pages == 32


def test_nobody_remembers_what_was_closed_or_interrupted(llm):
    stream = llm.stream("the", greedy(9, stop=("never",)))
    next(stream)
    requests = [stream.request]
    stream.close()
    requests += llm.requests("the", greedy(9, stop=("never",)))
    llm._engine.submit(requests[1:])
    llm._engine.step()
    llm._engine.abandon(requests[1:])
    del stream
    for request in requests:
        holders = [holder for holder in gc.get_referrers(request) if isinstance(holder, (dict, list, tuple))]
        assert holders == [requests]


SCRIPT = """
import os, random, signal, sys, threading, time
import contbatch as cb

llm = cb.LLM(sys.argv[1], num_pages=32)
prompts, sampling = [[5, 6, 7] * 20, [9] * 33, [3, 4]], cb.SamplingParams(max_tokens=20, ignore_eos=True)
expected = [o.token_ids for o in llm.generate(prompts, sampling, progress=False)]
began = time.perf_counter()
llm.generate(prompts, sampling, progress=False)
took, rng, interrupts = time.perf_counter() - began, random.Random(0), 0

def press(delay):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(40):
    thread = threading.Thread(target=press, args=[rng.uniform(0, took)])
    try:
        thread.start()
        try:
            llm.generate(prompts, sampling, progress=False)
        except KeyboardInterrupt:
            interrupts += 1
            raise
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        thread.join()
    else:
        raise SystemExit("an interrupt was lost")
    assert llm.num_free_pages == 32
    assert [o.token_ids for o in llm.generate(prompts, sampling, progress=False)] == expected
print(interrupts)
stream = llm.stream("the")  # left at exit in a reference cycle: no noise
next(stream)
cycle = [stream]
cycle.append(cycle)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill can't send an interrupt there")
def test_real_signals(folder):
    environment = os.environ | {"TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 13


def test_close_while_another_thread_generates(folder):
    llm, errors, begun = cb.LLM(folder, num_pages=32), [], threading.Event()

    def work():
        try:
            while True:
                tokens_of(llm)
                begun.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    llm.close()
    thread.join()
    assert [type(error) for error in errors] == [RunnerError]
    assert llm.num_free_pages == 32


def test_a_dropped_llm_is_freed_at_once_but_not_before_its_streams(folder):
    gc.disable()
    try:
        llm = cb.LLM(folder, num_pages=32)
        model = weakref.ref(llm.runner.model)
        tokens_of(llm)
        ran(llm)
        stream = llm.stream("the", greedy(5))
        text = next(stream)
        llm = None
        assert len(text + "".join(stream)) > 1
        stream = None
        assert model() is None
    finally:
        gc.enable()
