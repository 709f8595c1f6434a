"""Workloads: the turns they make, the requests that come of them, and files of them."""

import hashlib
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.arrivals import AllAtOnce, BurstArrivals, PoissonArrivals
from contbatch.errors import TraceFileError, WorkloadError
from contbatch.lengths import Fixed, Uniform, Zipf
from contbatch.sessions import AgentLoops, ClosedLoop, Conversations
from contbatch.source import STOP_TOKEN, Source
from contbatch.trace import Trace
from contbatch.turn import Client, PromptTokens, Segment, Turn
from contbatch.workload import Mixture, OpenLoop, Poisson, SharedPrefix
from contbatch.workload_file import load_workload

SEED, RATE = st.integers(0, 2**64), st.floats(0.01, 100)
CLIENT = st.builds(
    Client,
    client_id=st.sampled_from([None, "A", "B"]),
    priority=st.integers(0, 3),
    ttft_target_s=st.sampled_from([None, 2.0]),
    cache_salt=st.sampled_from([None, "", "salt"]),
    max_tokens=st.sampled_from([None, 200]),
)
PREFIX = st.one_of(st.none(), st.builds(SharedPrefix, st.integers(1, 9), st.integers(1, 4), st.floats(0, 3)))
COMMON = {"prompt": st.just(Uniform(1, 30)), "output": st.just(Uniform(1, 20)), "prefix": PREFIX, "client": CLIENT}
COMMON |= {"seed": SEED}
ARRIVALS = st.one_of(RATE.map(PoissonArrivals), st.just(AllAtOnce()), st.just(BurstArrivals(3, 2.0)))
COUNT = st.integers(1, 20)
SINGLE = st.one_of(
    st.builds(Poisson, rate=RATE, num_requests=COUNT, **COMMON),
    st.builds(OpenLoop, arrivals=ARRIVALS, num_requests=COUNT, **COMMON),
    st.builds(ClosedLoop, num_clients=st.integers(1, 5), num_requests=st.integers(5, 20), **COMMON),
    st.builds(Conversations, arrivals=ARRIVALS, num_conversations=COUNT, turns_each=st.just(Zipf(1, 4)), **COMMON),
    st.builds(
        AgentLoops,
        arrivals=ARRIVALS,
        num_tasks=COUNT,
        tool_calls=st.just(Uniform(1, 3)),
        answer=st.just(Fixed(9)),
        prefix=PREFIX,
        client=CLIENT,
        seed=SEED,
    ),
)
ANY = st.one_of(SINGLE, st.lists(SINGLE, min_size=1, max_size=3).map(Mixture))


def finish(request, tokens=()):
    """End a request as a runner would."""
    request.output_token_ids += tokens or [0] * request.expected_output_tokens
    request.finish_reason = "length"


# ---- turns -------------------------------------------------------------------------------------------------------


@given(ANY)
def test_turns_repeat_and_those_of_a_session_are_side_by_side(workload):
    turns = workload.turns()
    assert turns == workload.turns()
    first = [i for i, turn in enumerate(turns) if i == 0 or turns[i - 1].session != turn.session]
    assert sorted(turns[i].session for i in first) == list(range(len(first)))
    assert not any(turns[i].keeps_context for i in first)


@given(st.integers(1, 30), st.integers(0, 30), SEED)
def test_more_requests_leave_the_first_as_they_were(n, more, seed):
    few = Poisson(rate=3.0, num_requests=n, prefix=SharedPrefix(8, 3), seed=seed)
    assert few.replace(num_requests=n + more).turns()[:n] == few.turns()


@given(SINGLE, SEED)
def test_another_seed_is_another_workload(workload, seed):
    assert (workload.seed == seed) or workload.replace(seed=seed).turns() != workload.turns()


def test_a_rate_changes_the_times_and_nothing_else():
    slow, fast = (Poisson(rate=rate, num_requests=50, seed=3).turns() for rate in (1.0, 4.0))
    assert [t.prompt for t in slow] == [t.prompt for t in fast]
    assert [t.delay_s for t in slow] == pytest.approx([4 * t.delay_s for t in fast])


@given(SINGLE)
def test_a_client_is_that_of_all_its_requests(workload):
    for turn in workload.turns():
        assert turn.client == workload.client
    for r in workload.requests():
        client = workload.client
        given_ = (r.client_id, r.priority, r.ttft_target_s, r.cache_salt, r.sampling.max_tokens)
        asked = client.max_tokens or r.expected_output_tokens
        assert given_ == (client.client_id, client.priority, client.ttft_target_s, client.cache_salt, asked)


@given(st.lists(SINGLE, min_size=1, max_size=4))
def test_a_mixture_has_all_that_its_parts_have(parts):
    mixed, apart = Mixture(parts).turns(), [turn for part in parts for turn in part.turns()]

    def content(turns):
        return [(t.delay_s, t.prompt, t.output_tokens, t.keeps_context, t.client) for t in turns]

    assert content(mixed) == content(apart)
    sessions = sum(len({turn.session for turn in part.turns()}) for part in parts)
    assert len({turn.session for turn in mixed}) == sessions


def test_shared_prefixes_are_as_popular_as_zipf_says():
    prefix = SharedPrefix(Uniform(10, 20), num_prefixes=10, exponent=1.0)
    turns = OpenLoop(arrivals=AllAtOnce(), num_requests=20_000, prompt=5, output=1, prefix=prefix).turns()
    counts = sorted(Counter(turn.prompt[0] for turn in turns).values(), reverse=True)
    total = sum(1 / k for k in range(1, 11))
    for k, count in enumerate(counts, 1):
        due = 20_000 / k / total
        assert abs(count - due) < 5 * math.sqrt(due)
    assert len({turn.prompt[1].key for turn in turns}) == 20_000, "what follows is everybody's own"


# ---- prompts -----------------------------------------------------------------------------------------------------

PARTS = st.lists(
    st.one_of(st.builds(Segment, st.integers(-5, 2**70), st.integers(1, 9)), st.lists(st.integers(0, 50), max_size=5)),
    max_size=5,
)


@given(PARTS, st.integers(51, 200), st.integers(0, 60), st.integers(0, 60))
def test_a_prompt_is_its_parts_one_after_the_other(parts, vocab_size, start, stop):
    tokens = PromptTokens(parts, vocab_size)
    whole = [t for part in parts for t in (PromptTokens([part], vocab_size) if isinstance(part, Segment) else part)]
    assert len(tokens) == len(whole)
    assert list(tokens) == whole
    assert tokens[start:stop] == whole[start:stop]
    assert all(0 <= t < vocab_size for t in whole)


@given(st.integers(0, 2**63), st.integers(1, 20), st.integers(0, 20))
def test_segments_of_one_key_begin_alike(key, n, more):
    short, long = (PromptTokens([Segment(key, k)], 1000)[:] for k in (n, n + more))
    assert long[:n] == short


def test_segments_of_other_keys_differ():
    assert len({tuple(PromptTokens([Segment(key, 8)], 32000)[:]) for key in range(1000)}) == 1000


# ---- requests that follow others ---------------------------------------------------------------------------------


def play(workload):
    """Answer every request at once; return (request, when it was made) in order."""
    source = workload.source()
    live, made = list(source.requests()), []
    while live:
        request = live.pop(0)
        made.append(request)
        finish(request)
        live += source.on_finish(request, request.arrival_time + 1.0)
    return made


@given(ANY)
def test_every_turn_becomes_one_request(workload):
    turns, made = workload.turns(), play(workload)
    assert sorted(r.request_id for r in made) == list(range(len(turns)))
    assert all(r.expected_output_tokens == turns[r.request_id].output_tokens for r in made)


@given(ANY)
def test_a_turn_comes_its_delay_after_the_answer_before_it(workload):
    turns = workload.turns()
    at = {r.request_id: r.arrival_time for r in play(workload)}
    for i, turn in enumerate(turns):
        follows = i and turns[i - 1].session == turn.session
        assert at[i] == (at[i - 1] + 1.0 + turn.delay_s if follows else turn.delay_s)


def test_a_conversation_repeats_all_that_was_said():
    prefix = SharedPrefix(3)
    chat = Conversations(arrivals=AllAtOnce(), num_conversations=1, turns_each=3, prompt=4, output=2, prefix=prefix)
    source = chat.source()
    [first] = source.requests()
    finish(first, [7, 8])
    [second] = source.on_finish(first, 10.0)
    finish(second, [9, 9])
    [third] = source.on_finish(second, 20.0)
    assert [len(r.prompt_token_ids) for r in (first, second, third)] == [7, 13, 19]
    assert second.prompt_token_ids[:9] == [*first.prompt_token_ids, 7, 8]
    assert third.prompt_token_ids[:15] == [*second.prompt_token_ids, 9, 9]
    finish(third)
    assert source.on_finish(third, 30.0) == []


@pytest.mark.parametrize("reason", ["abort", "error", "rejected"])
def test_a_conversation_ends_with_a_failure_and_a_closed_loop_goes_on(reason):
    for workload, follows in (
        (Conversations(arrivals=AllAtOnce(), num_conversations=1, turns_each=2), 0),
        (ClosedLoop(num_clients=1, num_requests=2), 1),
    ):
        source = workload.source()
        [first] = source.requests()
        first.finish_reason = reason
        assert len(source.on_finish(first, 1.0)) == follows


def test_a_source_leaves_foreign_requests_alone():
    source = ClosedLoop(num_clients=1, num_requests=2).source()
    for request_id in ("a", -1, 1, 99):
        request = next(source.requests())
        request.request_id = request_id
        assert source.on_finish(request, 1.0) == []


def test_agents_call_tools_between_task_and_answer():
    loops = AgentLoops(
        arrivals=AllAtOnce(), num_tasks=2, tool_calls=3, task=100, call=10, result=50, answer=20, tool_s=2
    )
    turns = loops.turns()
    assert [t.num_new_tokens for t in turns] == [100, 50, 50, 50] * 2
    assert [t.output_tokens for t in turns] == [10, 10, 10, 20] * 2
    assert [t.delay_s for t in turns] == [0, 2, 2, 2] * 2
    assert [len(r.prompt_token_ids) for r in play(loops) if r.request_id < 4] == [100, 160, 220, 280]


def test_an_answer_shorter_than_asked_for_has_a_stop_token():
    turns = [
        Turn(0, 0.0, ((1, 5),), 3, client=Client(max_tokens=10)),
        Turn(1, 0.0, ((2, 5),), 10, client=Client(max_tokens=10)),
    ]
    short, full = Source(turns).requests()
    assert (short.sampling.max_tokens, short.expected_output_tokens, short.stop_ids) == (10, 3, {STOP_TOKEN})
    assert (full.sampling.max_tokens, full.expected_output_tokens, full.stop_ids) == (10, 10, set())


# ---- bad values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(rate=0, num_requests=1), "rate must be a finite number > 0, got 0"),
        (lambda: Poisson(rate=1, num_requests=0), "num_requests must be an integer in .1, 10000000., got 0"),
        (lambda: Poisson(rate=1, num_requests=1, seed=-1), "seed must be an integer ≥ 0, got -1"),
        (lambda: Poisson(rate=1, num_requests=1, prompt=0), "tokens must be"),
        (lambda: Poisson(rate=1, num_requests=1, output=3.5), "output must be a distribution"),
        (lambda: Poisson(rate=1, num_requests=1).replace(rat=2), "the field to replace must be one of .* got 'rat'"),
        (lambda: OpenLoop(arrivals=4, num_requests=1), "arrivals must be one of contbatch.arrivals, got 4"),
        (lambda: ClosedLoop(num_clients=3, num_requests=2), "num_requests must be at least num_clients = 3, got 2"),
        (lambda: ClosedLoop(num_clients=1, num_requests=2, think_s=-1), "think_s must be finite seconds ≥ 0, got -1"),
        (lambda: Conversations(arrivals=None, num_conversations=1), "arrivals"),
        (lambda: AgentLoops(arrivals=AllAtOnce(), num_tasks=1, tool_s=math.inf), "tool_s"),
        (lambda: SharedPrefix(10, num_prefixes=0), "num_prefixes"),
        (lambda: Mixture(()), "parts must be one workload or more"),
        (lambda: Mixture([1]), "parts must be one workload or more"),
        (lambda: Client(max_tokens=0), "max_tokens must be None or an integer ≥ 1, got 0"),
        (lambda: Client(ttft_target_s=0), "ttft_target_s"),
        (lambda: Turn(0, -1, ((1, 1),), 1), "delay_s must be finite seconds ≥ 0, got -1"),
        (lambda: Turn(0, 0, (), 1), "prompt must be at least one segment"),
        (lambda: Turn(0, 0, ((1, 0),), 1), r"num_tokens of a segment must be an integer in \[1, 2147483647\], got 0"),
        (lambda: Turn(0, 0, ((1, 1),), 0), "output_tokens must be an integer ≥ 1, got 0"),
        (lambda: Turn(0, 0, ((1, 1),), 9, client=Client(max_tokens=8)), "at most max_tokens = 8 of its client, got 9"),
        (lambda: Source([Turn(i, 0, ((1, 1),), 1) for i in (0, 1, 0)]), "turns must be grouped by session"),
        (lambda: Source([], 0), "vocab_size must be an integer in .1, 2..31., got 0"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workloads")


@settings(max_examples=20)
@given(ANY, st.sampled_from(["jsonl", "parquet"]))
def test_a_workload_survives_a_file(folder, workload, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    workload.save(folder / f"w.{suffix}")
    loaded = load_workload(folder / f"w.{suffix}")
    assert loaded.turns() == workload.turns()
    assert loaded.name == f"w.{suffix}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: an object with 'session' was expected"),
        ('"delay_s": 0.0', "line 2: an object with 'session' was expected"),
        (None, "line 2: output_tokens must be an integer ≥ 1, got 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    Poisson(rate=1, num_requests=3).save(tmp_path / "w.jsonl")
    lines = (tmp_path / "w.jsonl").read_text().split("\n")
    good = lines[1]
    output = good[good.index('"output_tokens"') : good.index(', "keeps_context"')]
    lines[1] = good.replace(output, '"output_tokens": 0') if line is None else "{" + line + "}" if ":" in line else line
    (tmp_path / "w.jsonl").write_text("\n".join(lines))
    with pytest.raises(TraceFileError, match=message):
        load_workload(tmp_path / "w.jsonl")


def test_files_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"must be one that ends in .jsonl or .parquet, got 'w.csv'"):
        Poisson(rate=1, num_requests=1).save(tmp_path / "w.csv")
    with pytest.raises(TraceFileError, match="cannot be read"):
        load_workload(tmp_path / "nothing.jsonl")
    pytest.importorskip("pyarrow")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceFileError, match=r"bad.parquet: cannot be read"):
        load_workload(tmp_path / "bad.parquet")
    huge = Trace((Turn(0, 0.0, ((2**70, 1),), 1),), "huge")
    with pytest.raises(WorkloadError, match="does not fit 64 bits"):
        huge.save(tmp_path / "huge.parquet")


HASHES = {
    "Poisson": "96e3adb3894c4738",
    "ClosedLoop": "c547f62b33fc1fc8",
    "Conversations": "12bea05f1541a31f",
    "AgentLoops": "f270ad455d50e0a9",
}


def test_the_same_requests_on_every_platform():
    prefix = SharedPrefix(Uniform(20, 40), 5, 1.2)
    made = [
        Poisson(rate=4, num_requests=200, prefix=prefix),
        ClosedLoop(num_clients=7, num_requests=100, think_s=1.5),
        Conversations(arrivals=PoissonArrivals(0.5), num_conversations=30, prefix=prefix),
        AgentLoops(arrivals=PoissonArrivals(0.5), num_tasks=30, tool_calls=Zipf(1, 6)),
    ]
    found = {}
    for workload in made:
        rows = [(t.session, t.delay_s.hex(), t.prompt, t.output_tokens) for t in workload.turns()]
        tokens = [list(r.prompt_token_ids[:20]) for r in workload.requests()]
        found[type(workload).__name__] = hashlib.sha256(repr((rows, tokens)).encode()).hexdigest()[:16]
    assert found == HASHES
