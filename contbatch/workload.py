"""What clients want of a server: a description from which the same requests are made every time."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from contbatch.arrivals import Arrivals, PoissonArrivals
from contbatch.checks import is_int, is_real, replaced, require, take_python_numbers
from contbatch.errors import WorkloadError
from contbatch.lengths import Lengths, Uniform, as_lengths, zipf_ranks
from contbatch.portable import integers
from contbatch.request import Request
from contbatch.source import DEFAULT_VOCAB_SIZE, Source
from contbatch.turn import Client, Segment, Turn, require_client

_require = partial(require, error=WorkloadError)
MAX_REQUESTS = 10_000_000
ORCA_PROMPT, ORCA_OUTPUT = Uniform(32, 512), Uniform(1, 128)
"""Lengths of Orca's synthetic trace (OSDI 2022), the default."""


class Workload(ABC):
    """Turns of sessions. Subclasses are frozen dataclasses: the same fields, the same turns, on every platform."""

    @abstractmethod
    def turns(self) -> list[Turn]:
        """Make the turns: those of a session side by side, in order."""

    def source(self, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Source:
        """Return what makes requests of the turns, with token ids below `vocab_size`."""
        return Source(self.turns(), vocab_size)

    def requests(self, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[Request]:
        """Make the first request of every session: all there are, unless answers bring more (see `Source`)."""
        return list(self.source(vocab_size).requests())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the turns to a .jsonl or .parquet file, for `contbatch.workload_file.load_workload`."""
        from contbatch.workload_file import save_turns

        save_turns(self.turns(), path)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; an unknown field raises `WorkloadError`."""
        return replaced(self, changes, WorkloadError)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Beginnings that requests have in common, such as system prompts.

    Parameters
    ----------
    tokens : int or Lengths
        Length of each, besides the request's own prompt.
    num_prefixes : int
    exponent : float
        The i-th most popular is drawn in proportion to i^-exponent; 0 draws all alike.
    """

    tokens: Lengths | int
    num_prefixes: int = 1
    exponent: float = 0.0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        object.__setattr__(self, "tokens", as_lengths(self.tokens, "tokens"))
        count, limit = self.num_prefixes, f"an integer in [1, {MAX_REQUESTS}]"
        _require(is_int(count, 1, MAX_REQUESTS), "num_prefixes", count, limit)
        _require(is_real(self.exponent) and self.exponent >= 0, "exponent", self.exponent, "a finite number ≥ 0")

    def draw(self, n: int, seed: int) -> list[tuple[Segment]]:
        """Draw the beginnings of n prompts."""
        lengths = as_lengths(self.tokens, "tokens").draw(self.num_prefixes, seed, "prefix lengths").tolist()
        keys = new_keys(self.num_prefixes, seed, "prefix")
        chosen = zipf_ranks(n, self.num_prefixes, self.exponent, seed, "prefix choice")
        return [(Segment(keys[i], lengths[i]),) for i in chosen.tolist()]


def require_asked(prefix: object, client: object) -> None:
    """Check the shared beginnings and the client of a workload."""
    _require(prefix is None or isinstance(prefix, SharedPrefix), "prefix", prefix, "a SharedPrefix or None")
    require_client(client)


def new_keys(n: int, *key: int | str) -> list[int]:
    """Draw keys of segments that nothing else has: 63 bits each."""
    keys: list[int] = (integers(n, *key, "content") >> np.uint64(1)).tolist()
    return keys


def require_seeded(seed: object, **counts: object) -> None:
    """Check a seed, and counts of requests or the like."""
    for name, value in counts.items():
        _require(is_int(value, 1, MAX_REQUESTS), name, value, f"an integer in [1, {MAX_REQUESTS}]")
    _require(is_int(seed, 0), "seed", seed, "an integer ≥ 0")


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Workload):
    """Requests that come when they come, whether or not the server keeps up.

    Parameters
    ----------
    arrivals : Arrivals
    num_requests : int
    prompt, output : Lengths or int
        In tokens; drawn independently.
    prefix : SharedPrefix, optional
        Comes before each prompt, on top of its length.
    client : Client
    seed : int
    """

    arrivals: Arrivals
    num_requests: int
    prompt: Lengths | int = ORCA_PROMPT
    output: Lengths | int = ORCA_OUTPUT
    prefix: SharedPrefix | None = None
    client: Client = field(default=Client())
    seed: int = 0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(isinstance(self.arrivals, Arrivals), "arrivals", self.arrivals, "one of contbatch.arrivals")
        require_seeded(self.seed, num_requests=self.num_requests)
        require_asked(self.prefix, self.client)
        for name in ("prompt", "output"):
            object.__setattr__(self, name, as_lengths(getattr(self, name), name))

    def turns(self) -> list[Turn]:
        """Make a session of one turn for each request."""
        n, seed = self.num_requests, self.seed
        times = self.arrivals.times(n, seed, "arrivals").tolist()
        prompts = as_lengths(self.prompt, "prompt").draw(n, seed, "prompt").tolist()
        outputs = as_lengths(self.output, "output").draw(n, seed, "output").tolist()
        prefixes = self.prefix.draw(n, seed) if self.prefix else [()] * n
        own = map(Segment, new_keys(n, seed, "prompt"), prompts)
        rows = zip(times, prefixes, own, outputs, strict=True)
        return [Turn(i, at, (*prefix, o), out, False, self.client) for i, (at, prefix, o, out) in enumerate(rows)]


@dataclass(frozen=True, kw_only=True)
class Poisson(OpenLoop):
    """`OpenLoop` with Poisson arrivals, `rate` requests a second."""

    rate: float
    arrivals: Arrivals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        take_python_numbers(self)
        object.__setattr__(self, "arrivals", PoissonArrivals(self.rate))
        super().__post_init__()


@dataclass(frozen=True)
class Mixture(Workload):
    """Several workloads at once, such as one for each class of clients; their requests compete for the server."""

    parts: tuple[Workload, ...]

    def __post_init__(self) -> None:
        parts = tuple(self.parts) if isinstance(self.parts, Iterable) else (self.parts,)
        object.__setattr__(self, "parts", parts)
        parts_ok = bool(parts) and all(isinstance(part, Workload) for part in parts)
        _require(parts_ok, "parts", self.parts, "one workload or more")

    def turns(self) -> list[Turn]:
        """Put the turns of all parts one after the other, their sessions numbered anew."""
        rows: list[Turn] = []
        for part in self.parts:
            first, renumbered = (rows[-1].session + 1 if rows else 0), dict[int, int]()
            for turn in part.turns():
                session = renumbered.setdefault(turn.session, first + len(renumbered))
                rows.append(replace(turn, session=session))
        return rows
