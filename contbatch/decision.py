"""A row of the decision log: what the scheduler decided in one step, in integers.

A request is called by its number, its place in `DecisionLog.requests`; a row says what changed, never what stayed:

    step 4   plan       [[0, 1], [2, 9]]       the policy asked for 1 token of request 0, then 9 of request 2
             preempted  [1]
             admitted   [[2, 1, 0]]            request 2 sits on seat 1, 0 of its tokens in the prefix cache
             tables     [[2, 0, 7, 3]]         its page table from place 0 on: pages 7 and 3
             grants     [[0, 12, 1, 1], [2, 0, 5, 0]]      tokens 12..12 and sample one; tokens 0..4, no sample
             sampled    [[0, 42]]              what the runner made of it
"""

from dataclasses import dataclass, field

REASONS = ("length", "stop", "abort", "error")
MOVES = ("copy", "out", "in")
SAMPLES, PADDING = 1, 2


@dataclass(slots=True)
class Decision:
    """One row: a step as it was planned, then what came of it. Planned anew after a crash, a step has two rows."""

    step: int
    now: float
    """Seconds on the engine's clock."""
    queued: list[int] = field(default_factory=list)
    """Requests that began to wait: arrived or forked since the last row, or preempted in this one."""
    ranks: list[float] = field(default_factory=list)
    """The place among the waiting that the policy gave to each of `queued`."""
    plan: list[list[int]] = field(default_factory=list)
    """[request, tokens] that the policy asked for, as far as the step went."""
    preempted: list[int] = field(default_factory=list)
    admitted: list[list[int]] = field(default_factory=list)
    """[request, seat, tokens that it need not compute]."""
    restarted: list[int] = field(default_factory=list)
    """Requests that outgrew a contiguous run and begin again in another."""
    tables: list[list[int]] = field(default_factory=list)
    """[request, place, *pages]: its page table from that place on. Changes since the last row."""
    cached: list[int] = field(default_factory=list)
    """Pages that became cached since the last row: held by nobody, content kept."""
    uncached: list[int] = field(default_factory=list)
    free: int = 0
    """Free pages."""
    bound: list[int] = field(default_factory=list)
    """Limits that kept out something the plan asked for: places in `step.BINDING`."""
    moves: list[list[int]] = field(default_factory=list)
    """[place in `MOVES`, source, target]: pages whose content went elsewhere before the step was computed, in order."""
    host: list[list[int]] = field(default_factory=list)
    """[request, *host pages]: where a request that was swapped out has its pages; changes since the last row."""
    grants: list[list[int]] = field(default_factory=list)
    """[request, start, tokens, flags]: `SAMPLES`, `PADDING` or 0."""
    forked: list[int] = field(default_factory=list)
    """Further samples of prompts that are finished in this step: each draws its first token."""
    sampled: list[list[int]] = field(default_factory=list)
    """[request, token]."""
    lost: list[int] = field(default_factory=list)
    """Requests whose grant came to nothing: the step crashed, or they were aborted while it ran."""
    left: list[list[int]] = field(default_factory=list)
    """[request, place in `REASONS`]: who left before the next row."""
