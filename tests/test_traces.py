"""Loaders of public traces: the formats, and what is wrong in a file with its line."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.arrivals import BurstArrivals
from contbatch.errors import TraceFileError, WorkloadError
from contbatch.traces import load_azure, load_burstgpt, load_mooncake, load_sharegpt, load_vidur
from contbatch.turn import Client

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


@pytest.fixture
def file(tmp_path):
    def write(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def rows(trace):
    return [(t.delay_s, t.num_new_tokens, t.output_tokens) for t in trace.turns()]


# ---- formats -----------------------------------------------------------------------------------------------------


def test_azure_2023_crlf_seven_digits_no_final_newline(file):
    text = f"{AZURE}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,109"
    assert rows(load_azure(file(text))) == [(0.0, 374, 44), (4.3145791, 396, 109)]


def test_azure_2024_offsets_and_mixed_precision(file):
    lines = ["2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 00:00:01+00:00,3,4", "2024-05-10 02:00:02.5+02:00,5,6"]
    assert rows(load_azure(file("\n".join([AZURE, *lines, ""])))) == [(0.0, 1, 2), (0.99007, 3, 4), (2.49007, 5, 6)]


def test_burstgpt_columns_go_by_name_and_failed_requests_are_counted(file):
    old = f"{BURST}\n5,ChatGPT,472,18,490,x\n45,ChatGPT,1087,0,1087,x\n118,GPT-4,417,276,693,x\n"
    new = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,a,1.5,ChatGPT,472,18,490,x\n45,b,2,ChatGPT,1087,0,1087,x\n118,c,3,GPT-4,417,276,693,x\n"
    )
    for text in (old, new):
        trace = load_burstgpt(file(text))
        assert rows(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
        assert (trace.num_skipped, trace.num_reordered) == (1, 0)


def test_vidur(file):
    assert rows(load_vidur(file(f"{VIDUR}\n0.5,100,20\n1.75,7,3"))) == [(0.0, 100, 20), (1.25, 7, 3)]


def test_mooncake_blocks_that_are_equal_share_their_tokens(file):
    entries = [
        {"timestamp": 10, "input_length": 1100, "output_length": 5, "hash_ids": [0, 2**40, 7]},
        {"timestamp": 10, "input_length": 1030, "output_length": 6, "hash_ids": [0, 2**40, 8]},
        {"timestamp": 3010, "input_length": 512, "output_length": 7, "hash_ids": [0]},
    ]
    trace = load_mooncake(file("\n".join(map(json.dumps, entries)), "m.jsonl"))
    assert rows(trace) == [(0.0, 1100, 5), (0.0, 1030, 6), (3.0, 512, 7)]
    a, b, c = (list(r.prompt_token_ids) for r in trace.requests())
    assert a[:1024] == b[:1024]
    assert a[1024:1030] != b[1024:1030]
    assert c == a[:512]


def test_sharegpt_takes_the_first_question_and_answer(file):
    talks = [
        {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
        {"id": "c", "conversations": []},
        {"id": "d", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
        {"id": "e", "conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}] * 2},
    ]
    trace = load_sharegpt(file(json.dumps(talks), "s.json"), lambda text: len(text.split()))
    assert rows(trace) == [(0.0, 2, 1), (0.0, 3, 2)]
    assert trace.num_skipped == 3
    assert [t.delay_s for t in trace.with_arrivals(BurstArrivals(1, 5)).turns()] == [0.0, 5.0]


# ---- order -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_times_are_sorted_ties_keep_their_order_and_disorder_is_reported(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("order") / "t.csv"
    path.write_text("\n".join([VIDUR, *(f"{at},{i + 1},1" for i, at in enumerate(times))]))
    trace = load_vidur(path)
    expected = sorted((at, i + 1) for i, at in enumerate(times))
    assert [(t.delay_s, t.num_new_tokens) for t in trace.turns()] == [(at - min(times), n) for at, n in expected]
    assert trace.num_reordered == sum(a > b for a, b in pairwise(times))


# ---- what is wrong with a file -----------------------------------------------------------------------------------

GOOD = "2023-11-16 18:15:46.6805900,374,44"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: empty, expected a header with TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "line 1: no column 'GeneratedTokens'; the header has TIMESTAMP, ContextTokens"),
        (f"{AZURE}\n{GOOD}\n\n1,2", "line 4: 2 values, but the header has 3 columns"),
        (f"{AZURE}\n{GOOD},5", "line 2: 4 values"),
        (f"{AZURE}\r\n{GOOD}\r\nyesterday,1,1", "line 3: TIMESTAMP must be like .* got 'yesterday'"),
        (f"{AZURE}\n2023-13-16 18:15:46,1,1", "line 2: TIMESTAMP '2023-13-16 18:15:46': month"),
        (
            f"{AZURE}\n2023-11-16 18:15:46,1.5,1",
            r"line 2: ContextTokens must be an integer in .0, 1000000000., got '1.5'",
        ),
        (f"{AZURE}\n2023-11-16 18:15:46,1,-1", "line 2: GeneratedTokens must be an integer"),
        (f"{AZURE}\n2023-11-16 18:15:46,1,", "line 2: GeneratedTokens must be a number, got ''"),
        (f"{AZURE}\n2023-11-16 18:15:46,nan,1", "line 2: ContextTokens must be a number, got 'nan'"),
        (f"{AZURE}\n2023-11-16 18:15:46,1e999999999,1", "line 2: ContextTokens must be an integer"),
        (f'{AZURE}\n{GOOD}\n"2023-11-16,1,1', "line 3: unexpected end of data"),
        (f"{AZURE}\n{GOOD}\n".encode() + b"\xff\xfe", "line 3: not UTF-8"),
    ],
)
def test_a_malformed_azure_file_is_refused_by_line(file, text, message):
    with pytest.raises(TraceFileError, match=rf"trace.csv, {message}"):
        load_azure(file(text))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[" * 100_000, "line 2: no JSON"),
        ("3", "line 2: an object with 'timestamp' was expected"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "line 2: an object with 'hash_ids' was expected"),
        (
            '{"timestamp": true, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "timestamp must be a number, got True",
        ),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "timestamp must be a number, got nan",
        ),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp must be in"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "hash_ids must be 2 integers"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be 1 integers"),
    ],
)
def test_a_malformed_mooncake_file_is_refused_by_line(file, entry, message):
    good = '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}'
    with pytest.raises(TraceFileError, match=rf"m.jsonl, .*{message}"):
        load_mooncake(file(f"{good}\n{entry}\n", "m.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[\n{]", "line 2: no JSON"),
        ("{}", "line 1: a JSON array was expected, got dict"),
        ("[1]", "entry 1: an object was expected, got 1"),
        ('[{"conversations": 5}]', "entry 1: conversations must be a list of turns"),
        ('[{"conversations": [{"value": 5}]}]', "entry 1: conversations must be a list of turns"),
    ],
)
def test_a_malformed_sharegpt_file_is_refused_by_entry(file, text, message):
    with pytest.raises(TraceFileError, match=rf"s.json, {message}"):
        load_sharegpt(file(text, "s.json"), len)


@pytest.mark.parametrize("row", ["5,x,0,3,3,x", "5,x,3,0,3,x"])
def test_rows_without_tokens_are_counted_or_refused_never_clipped(file, row):
    path = file(f"{BURST}\n1,x,1,1,2,x\n{row}")
    trace = load_burstgpt(path)
    assert (rows(trace), trace.num_skipped) == ([(0.0, 1, 1)], 1)
    with pytest.raises(TraceFileError, match="line 3: prompt and answer must have tokens"):
        load_burstgpt(path, strict=True)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceFileError, match=r"none.csv: cannot be read: No such file"):
        load_azure(tmp_path / "none.csv")


# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three(file):
    return load_vidur(file(f"{VIDUR}\n10,1,1\n12,2,1\n20,3,1"))


def test_more_samples_than_rows_need_a_flag(three):
    with pytest.raises(WorkloadError, match=r"the number of sessions must be an integer in .0, 3., .*trace.csv, got 5"):
        three.sample(5)
    drawn = three.sample(5, oversample=True)
    assert len(drawn) == 5
    assert len(drawn.requests()) == 5
    with pytest.raises(WorkloadError, match="got 4"):
        three.head(4)


@given(st.integers(1, 3), st.integers(0, 1000))
def test_a_sample_draws_nobody_twice_and_keeps_the_times(n, seed):
    whole = load_whole()
    drawn = rows(whole.sample(n, seed))
    assert len(set(drawn)) == n
    assert drawn == sorted(drawn)
    assert set(drawn) <= set(rows(whole))


def load_whole():
    from contbatch.trace import Trace
    from contbatch.turn import Turn

    return Trace(tuple(Turn(i, float(i), ((i, i + 1),), 1) for i in range(3)), "made")


def test_head_rate_and_client(three):
    assert rows(three.head(2)) == [(0.0, 1, 1), (2.0, 2, 1)]
    assert [t.delay_s for t in three.at_rate(2.0).turns()] == pytest.approx([0, 0.2, 1.0]), "2 gaps in 1 second"
    named = three.with_client(Client(client_id="A", max_tokens=4))
    assert {r.client_id for r in named.requests()} == {"A"}
    with pytest.raises(WorkloadError, match="rate must be a finite number > 0, got 0"):
        three.at_rate(0)


# ---- the real ones -----------------------------------------------------------------------------------------------


def real(name):
    folder = os.environ.get("CONTBATCH_TRACES")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"CONTBATCH_TRACES names no folder with {name}")
    return Path(folder) / name


@pytest.mark.parametrize(
    ("name", "count", "context", "generated", "seconds", "cv"),
    [("conv", 19366, 1154.7, 211.1, 3502, 1.09), ("code", 8819, 2047.8, 27.9, 3436, 13.2)],
)
def test_the_azure_traces_of_2023(name, count, context, generated, seconds, cv):
    trace = load_azure(real(f"AzureLLMInferenceTrace_{name}.csv"))
    at, prompts, outputs = map(np.array, zip(*rows(trace), strict=True))
    gaps = np.diff(at)
    found = (len(trace), round(prompts.mean(), 1), round(outputs.mean(), 1), round(at[-1]))
    assert found == (count, context, generated, seconds)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05)
    assert (trace.num_skipped, trace.num_reordered) == (0, 0)


def test_the_mooncake_trace():
    trace = load_mooncake(real("mooncake_conversation_head2000.jsonl"))
    assert len(trace) + trace.num_skipped == 2000
    assert rows(trace)[0] == (0.0, 6758, 500)
