"""What the op refuses, and how it says so (CASES 22): the same for the executable spec and the CPU kernel."""

import numpy as np
import pytest
from paged_problem import Problem, same_bits

from contbatch.errors import RunnerError
from contbatch.plugins.paged_attention import step_plan


def test_pages_before_every_window_may_be_unmapped():
    problem = Problem([(100, 2)], attributes={"local_window_size": 20})
    mapped = problem.cpu(), problem.reference()
    problem.table[0, : (100 - 19) // 16] = -1
    assert same_bits(problem.cpu(), mapped[0])
    assert same_bits(problem.reference(), mapped[1])
    problem.table[0, (100 - 19) // 16] = -1
    with pytest.raises(RunnerError, match="not mapped"):
        problem.cpu()


def spoil(name, index, value):
    def change(problem):
        getattr(problem, name)[index] = value

    return change


BAD = {  # CASES 22 and the rest of the contract: what is wrong, and what the message names
    "page id = num_pages": (spoil("table", (1, 0), 7), r"block_table\[1, 0\] is page 7, outside 0\.\.6"),
    "page id < -1": (spoil("table", (0, 1), -7), r"block_table\[0, 1\] is page -7, outside 0\.\.6"),
    "unmapped past": (spoil("table", (0, 0), -1), r"block_table\[0, 0\] is not mapped"),
    "unmapped target": (spoil("table", (0, 2), -1), r"block_table\[0, 2\] is not mapped"),
    "negative past": (spoil("past", 1, -1), "past_seqlens must be ≥ 0, got -1 for sequence 1"),
    "decreasing": (spoil("cumulative", 1, 12), r"not decrease, got \[ 0 12  6\]"),
    "not from 0": (spoil("cumulative", 0, 1), r"start at 0 .* got \[1 2 6\]"),
    "too many tokens": (spoil("cumulative", 2, 7), "6 rows, got 7"),
    "beyond the table": (spoil("past", 0, 63), "position 64 of sequence 0 is beyond the block_table's row, limit 64"),
    "beyond rotary": (lambda p: setattr(p, "rotary_dim", 4), "position 41 of sequence 0 .* rotary tables, limit 10"),
    "written twice": (lambda p: p.table.__setitem__((1, 0), p.table[0, 0]), "is written for one sequence and used"),
    "int64 table": (lambda p: setattr(p, "table", p.table.astype(np.int64)), "dtype int32, got int64"),
    "flat table": (lambda p: setattr(p, "table", p.table[0]), r"got \(2,\) and \(4,\)"),
    "short cumulative": (lambda p: setattr(p, "cumulative", p.cumulative[:2]), r"shape \(3,\), got \(2,\)"),
    "odd heads": (lambda p: setattr(p, "heads", 0), "multiple of kv_num_heads 1, got 0"),
    "window 0": (lambda p: p.attributes.update(local_window_size=0), "-1 .none. or ≥ 1, got 0"),
    "softcap < 0": (lambda p: p.attributes.update(softcap=-1.0), "≥ 0, got -1"),
    "NaN scale": (lambda p: p.attributes.update(scale=float("nan")), "finite, got nan"),
    "double qkv": (lambda p: setattr(p, "qkv", p.qkv.astype(np.float64)[:, :1]), r"must have shape"),
    "double pages": (lambda p: p.caches.__setitem__(1, p.caches[1].astype(np.float64)), "float32, got float64"),
}


@pytest.mark.parametrize("run", [Problem.reference, Problem.cpu])
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what, run):
    problem = Problem([(40, 2), (5, 4)])
    change, message = BAD[what]
    problem.cos = problem.sin = np.ones((10, 2), np.float32)
    change(problem)
    with pytest.raises(RunnerError, match=message):
        run(problem)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_codes_need_a_step(step):
    with pytest.raises(RunnerError, match=f"output_step must be a finite number > 0, got {step}"):
        Problem([(0, 2)]).cpu(kind=np.int8, step=step)


def test_memory_layout_is_checked():
    problem = Problem([(0, 2)])
    problem.qkv = np.asfortranarray(problem.qkv)
    with pytest.raises(RunnerError, match="qkv must be C-contiguous and writable"):
        problem.cpu()
    with pytest.raises(RunnerError, match=r"head_size\), got \(1, 0, 1, 8\)"):
        step_plan.plan_step(*problem.steps(), num_rows=2, pages_shape=(1, 0, 1, 8), num_heads=1)
