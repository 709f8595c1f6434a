"""Workloads whose requests wait for answers: closed-loop clients, conversations, agents that call tools."""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from contbatch.arrivals import Arrivals
from contbatch.checks import require, require_seconds, take_python_numbers
from contbatch.errors import WorkloadError
from contbatch.lengths import Lengths, Uniform, as_lengths
from contbatch.portable import exponentials
from contbatch.turn import Client, Segment, Turn
from contbatch.workload import ORCA_OUTPUT, ORCA_PROMPT, SharedPrefix, Workload, new_keys, require_asked, require_seeded

_require = partial(require, error=WorkloadError)

_QUESTION = _ANSWER = Uniform(16, 256)
_CALL, _RESULT = Uniform(16, 64), Uniform(64, 512)


def _set_lengths(workload: Workload, *names: str) -> None:
    for name in names:
        object.__setattr__(workload, name, as_lengths(getattr(workload, name), name))


@dataclass(frozen=True, kw_only=True)
class ClosedLoop(Workload):
    """Clients that each have one request at a time: think, ask, wait for the answer, think again.

    Requests are dealt out to the clients in turn beforehand, so that every policy and every server gets the same ones
    from the same client. The load settles at what the server can do.

    Parameters
    ----------
    num_clients : int
    num_requests : int
        Of all clients together, at least one each.
    think_s : float
        Mean seconds from an answer to the next request, exponential; before the first request as well.
    prompt, output : Lengths or int
    prefix : SharedPrefix, optional
        Comes before each prompt, on top of its length.
    client : Client
    seed : int
    """

    num_clients: int
    num_requests: int
    think_s: float = 0.0
    prompt: Lengths | int = ORCA_PROMPT
    output: Lengths | int = ORCA_OUTPUT
    prefix: SharedPrefix | None = None
    client: Client = field(default=Client())
    seed: int = 0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_seeded(self.seed, num_clients=self.num_clients, num_requests=self.num_requests)
        enough = self.num_requests >= self.num_clients
        _require(enough, "num_requests", self.num_requests, f"at least num_clients = {self.num_clients}")
        require_seconds(WorkloadError, think_s=self.think_s)
        require_asked(self.prefix, self.client)
        _set_lengths(self, "prompt", "output")

    def turns(self) -> list[Turn]:
        """Make a session for each client, of turns that keep no context."""
        n, seed = self.num_requests, self.seed
        delays = (self.think_s * exponentials(n, seed, "think")).tolist()
        prompts = as_lengths(self.prompt, "prompt").draw(n, seed, "prompt").tolist()
        outputs = as_lengths(self.output, "output").draw(n, seed, "output").tolist()
        prefixes = self.prefix.draw(n, seed) if self.prefix else [()] * n
        keys = new_keys(n, seed, "prompt")
        return [
            Turn(who, delays[i], (*prefixes[i], Segment(keys[i], prompts[i])), outputs[i], False, self.client)
            for who in range(self.num_clients)
            for i in range(who, n, self.num_clients)
        ]


@dataclass(frozen=True, kw_only=True)
class Conversations(Workload):
    """People who chat: each turn's prompt is everything said before, and a new question.

    With a prefix cache only the question is computed; without one, the whole conversation, again at every turn.

    Parameters
    ----------
    arrivals : Arrivals
        Of the conversations.
    num_conversations : int
    turns_each : Lengths or int
        Turns of a conversation.
    prompt, output : Lengths or int
        Of a question and an answer.
    think_s : float
        Mean seconds from an answer to the next question, exponential.
    prefix : SharedPrefix, optional
        System prompts that conversations begin with.
    client : Client
    seed : int
    """

    arrivals: Arrivals
    num_conversations: int
    turns_each: Lengths | int = 4
    prompt: Lengths | int = _QUESTION
    output: Lengths | int = _ANSWER
    think_s: float = 10.0
    prefix: SharedPrefix | None = None
    client: Client = field(default=Client())
    seed: int = 0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(isinstance(self.arrivals, Arrivals), "arrivals", self.arrivals, "one of contbatch.arrivals")
        require_seeded(self.seed, num_conversations=self.num_conversations)
        require_seconds(WorkloadError, think_s=self.think_s)
        require_asked(self.prefix, self.client)
        _set_lengths(self, "turns_each", "prompt", "output")

    def turns(self) -> list[Turn]:
        """Make a session for each conversation."""
        seed, starts = self.seed, _starts(self.turns_each, self.num_conversations, self.seed)
        delays = self.think_s * exponentials(starts[-1], seed, "think")
        prompts = as_lengths(self.prompt, "prompt").draw(starts[-1], seed, "prompt")
        outputs = as_lengths(self.output, "output").draw(starts[-1], seed, "output")
        return _conversations(self, starts, delays, prompts, outputs)


@dataclass(frozen=True, kw_only=True)
class AgentLoops(Workload):
    """Agents that call tools: every call is a request over the whole context so far, and its result makes that longer.

    The context is the tax that each call pays: k calls compute it k + 1 times over, unless a prefix cache holds it.

    Parameters
    ----------
    arrivals : Arrivals
        Of the tasks.
    num_tasks : int
    tool_calls : Lengths or int
        Calls of a task; after the last result comes the answer.
    task, call, result, answer : Lengths or int
        Tokens of the task's prompt, of a call, of its result, and of the answer.
    tool_s : float
        Seconds that a tool takes.
    prefix : SharedPrefix, optional
        Instructions and tool descriptions that all tasks begin with.
    client : Client
    seed : int
    """

    arrivals: Arrivals
    num_tasks: int
    tool_calls: Lengths | int = 5
    task: Lengths | int = _QUESTION
    call: Lengths | int = _CALL
    result: Lengths | int = _RESULT
    answer: Lengths | int = _ANSWER
    tool_s: float = 1.0
    prefix: SharedPrefix | None = None
    client: Client = field(default=Client())
    seed: int = 0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(isinstance(self.arrivals, Arrivals), "arrivals", self.arrivals, "one of contbatch.arrivals")
        require_seeded(self.seed, num_tasks=self.num_tasks)
        require_seconds(WorkloadError, tool_s=self.tool_s)
        require_asked(self.prefix, self.client)
        _set_lengths(self, "tool_calls", "task", "call", "result", "answer")

    def turns(self) -> list[Turn]:
        """Make a session for each task: a turn for each call, and one for the answer."""
        seed = self.seed
        starts = _starts(self.tool_calls, self.num_tasks, seed)
        starts += np.arange(self.num_tasks + 1)  # one turn more than calls
        first, last = starts[:-1], starts[1:] - 1
        prompts = as_lengths(self.result, "result").draw(starts[-1], seed, "result")
        prompts[first] = as_lengths(self.task, "task").draw(self.num_tasks, seed, "task")
        outputs = as_lengths(self.call, "call").draw(starts[-1], seed, "call")
        outputs[last] = as_lengths(self.answer, "answer").draw(self.num_tasks, seed, "answer")
        return _conversations(self, starts, np.full(starts[-1], float(self.tool_s)), prompts, outputs)


def _starts(turns: Lengths | int, sessions: int, seed: int) -> np.ndarray:
    """Where each session's turns begin in a list of all, and where the last one's end."""
    counts = as_lengths(turns, "turns").draw(sessions, seed, "turns")
    return np.concatenate([[0], np.cumsum(counts)])


def _conversations(
    workload: Conversations | AgentLoops,
    starts: np.ndarray,
    delays: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
) -> list[Turn]:
    sessions, seed = len(starts) - 1, workload.seed
    delays[starts[:-1]] = workload.arrivals.times(sessions, seed, "arrivals")
    prefixes = workload.prefix.draw(sessions, seed) if workload.prefix else [()] * sessions
    keys = new_keys(int(starts[-1]), seed, "prompt")
    rows, columns = [], (delays.tolist(), prompts.tolist(), outputs.tolist())
    for session, (start, stop) in enumerate(pairwise(starts.tolist())):
        for i in range(start, stop):
            delay, prompt, output = (column[i] for column in columns)
            head = prefixes[session] if i == start else ()
            rows.append(Turn(session, delay, (*head, Segment(keys[i], prompt)), output, i > start, workload.client))
    return rows
