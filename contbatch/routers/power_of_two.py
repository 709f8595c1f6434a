"""Two at random, the better of them."""

from random import Random

from contbatch.checks import is_int, python_number, require
from contbatch.request import Request
from contbatch.routers.router import Loads, Router


class PowerOfTwo(Router):
    """Of two replicas drawn at random, that with fewer tokens of unfinished requests.

    M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001: nearly as even as
    looking at all of them, and no herd runs to the emptiest.

    Parameters
    ----------
    seed : int
        Of the draws: ≥ 0.
    """

    def __init__(self, seed: int = 0) -> None:
        seed = python_number(seed)
        require(is_int(seed, 0), "seed", seed, "an integer ≥ 0")
        self.seed = seed
        self._random = Random(seed)

    def choose(self, request: Request, loads: Loads) -> int:  # noqa: ARG002, D102
        n = len(loads)
        first = int(self._random.random() * n)  # of Random only random() is promised to stay the same
        second = (first + 1 + int(self._random.random() * (n - 1))) % n
        return second if loads.tokens[second] < loads.tokens[first] else first

    def __repr__(self) -> str:
        return f"PowerOfTwo(seed={self.seed})"
