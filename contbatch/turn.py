"""One request before it exists: what a client sends, when, and how long the answer will be."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, overload

from contbatch.checks import is_int, is_real, python_number, require, take_python_numbers, tuple_of
from contbatch.errors import WorkloadError

_require = partial(require, error=WorkloadError)
_MASK = 2**64 - 1
_MOST = 2**31 - 1
"""Tokens of a segment: more than any memory has."""


class Segment(NamedTuple):
    """A stretch of a prompt. Segments of equal key have equal tokens, as far as both go: a shared beginning."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Whose requests they are, and what is promised to them: see `Request` for the fields.

    `max_tokens` is what the client asks for; an answer ends before, at the length that the workload knows, with a stop
    token. None asks for just that length.
    """

    client_id: str | None = None
    priority: float = 0.0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        take_python_numbers(self)
        for name in ("client_id", "cache_salt"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, value, "a string or None")
        _require(is_real(self.priority), "priority", self.priority, "a finite number")
        for name in ("ttft_target_s", "tpot_target_s"):
            value = getattr(self, name)
            _require(value is None or (is_real(value) and value > 0), name, value, "None or finite seconds > 0")
        asked = self.max_tokens
        _require(asked is None or is_int(asked, 1), "max_tokens", asked, "None or an integer ≥ 1")


def require_client(client: object) -> None:
    """Raise `WorkloadError` for what is no client."""
    _require(isinstance(client, Client), "client", client, "a Client")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session: a single question, a turn of a conversation, or a call of an agent.

    Parameters
    ----------
    session : int
        Turns of one session follow one another: each waits for the answer to the one before.
    delay_s : float
        Seconds after that answer; for the first, seconds on the clock.
    prompt : tuple of Segment
        What is new in the prompt, at least one token.
    output_tokens : int
        Length of the answer.
    keeps_context : bool
        The prompt begins with the whole turn before: its prompt and its answer.
    client : Client
    """

    session: int
    delay_s: float
    prompt: tuple[Segment, ...]
    output_tokens: int
    keeps_context: bool = False
    client: Client = field(default=Client())

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, tuple) or {*map(type, self.prompt)} != {Segment}:
            object.__setattr__(self, "prompt", _segments(self.prompt))
        if not is_int(self.session, 0):
            self._refuse("session", self.session, "an integer ≥ 0")
        if type(self.delay_s) is not float:  # NumPy's are Python's to `is_real`, as a subclass
            object.__setattr__(self, "delay_s", python_number(self.delay_s))
        if not (is_real(self.delay_s) and self.delay_s >= 0):
            self._refuse("delay_s", self.delay_s, "finite seconds ≥ 0")
        for key, num_tokens in self.prompt:
            if not is_int(key):
                self._refuse("the key of a segment", key, "an integer")
            if not is_int(num_tokens, 1, _MOST):
                self._refuse("num_tokens of a segment", num_tokens, f"an integer in [1, {_MOST}]")
        if not self.prompt:
            self._refuse("prompt", self.prompt, "at least one segment")
        if not is_int(self.output_tokens, 1):
            self._refuse("output_tokens", self.output_tokens, "an integer ≥ 1")
        if type(self.client) is not Client:
            require_client(self.client)
        most = self.client.max_tokens
        if most is not None and self.output_tokens > most:
            self._refuse("output_tokens", self.output_tokens, f"at most max_tokens = {most} of its client")

    def _refuse(self, name: str, value: object, limit: str) -> None:
        """Raise `WorkloadError`, unless what is wrong is that numbers are NumPy's: they become Python's."""
        if python_number(value) is value:
            _require(False, name, value, limit)
        take_python_numbers(self)
        object.__setattr__(self, "prompt", _segments(self.prompt))
        self.__post_init__()

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens, those of the context left out."""
        return sum(segment.num_tokens for segment in self.prompt)


def _segments(prompt: object) -> tuple[Segment, ...]:
    limit = "segments, or pairs of a key and a number of tokens"
    pairs = tuple_of(prompt, "prompt", limit, WorkloadError)
    _require(all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs), "prompt", prompt, limit)
    return tuple(Segment(*map(python_number, pair)) for pair in pairs)


class PromptTokens(Sequence[int]):
    """Token ids of a prompt made of segments and earlier answers; nothing is computed before somebody looks.

    Parameters
    ----------
    parts : iterable of Segment or sequence of int
    vocab_size : int
        Token ids are in [0, vocab_size).
    """

    __slots__ = ("_length", "_tokens", "parts", "vocab_size")

    def __init__(self, parts: Iterable[Segment | Sequence[int]], vocab_size: int) -> None:
        self.parts, self.vocab_size, self._length = tuple(parts), vocab_size, 0
        for part in self.parts:
            self._length += part[1] if type(part) is Segment else len(part)
        self._tokens: array[int] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if self._tokens is None:
            self._tokens = array("l")
            for part in self.parts:
                self._tokens.extend(_tokens(part, self.vocab_size) if isinstance(part, Segment) else part)
        return self._tokens[index].tolist() if isinstance(index, slice) else self._tokens[index]


def _tokens(segment: Segment, vocab_size: int) -> Iterable[int]:
    """Yield the segment's tokens: a hash of key and position (Steele et al. 2014, SplitMix)."""
    state = segment.key & _MASK
    for _ in range(segment.num_tokens):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        yield (mixed ^ (mixed >> 31)) % vocab_size
