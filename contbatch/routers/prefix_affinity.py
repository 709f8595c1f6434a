"""To whoever has seen the beginning of the prompt before."""

from contbatch.checks import is_limit, python_number, require, require_counts
from contbatch.request import Request
from contbatch.routers.router import Loads, Router


class PrefixAffinity(Router):
    """The replica that last got a prompt with the longest common beginning, unless it has too much to do.

    The router remembers what it sent where, not what is still cached there. It looks at whole blocks of a prompt,
    hashed one upon the other. Nobody known, or the known one too busy: the replica with the fewest tokens. After the
    cache-aware router of SGLang (Zheng et al., NeurIPS 2024), which also weighs affinity against balance.

    Parameters
    ----------
    block_size : int
        Tokens of a prompt that are compared at once.
    lead : float
        Tokens: with more than so many unfinished ones beyond those of the emptiest replica, the known one is passed
        over; infinity always follows the prefix, 0 follows it only to the emptiest.
    """

    def __init__(self, block_size: int = 64, lead: float = 16384) -> None:
        [block_size], lead = require_counts(block_size=block_size), python_number(lead)
        require(is_limit(lead), "lead", lead, "a number of tokens ≥ 0")
        self.block_size, self.lead = block_size, lead
        self._last: dict[int, int] = {}

    def choose(self, request: Request, loads: Loads) -> int:  # noqa: D102
        blocks, emptiest = self._blocks(request), int(loads.tokens.argmin())
        chosen = next((self._last[block] for block in reversed(blocks) if block in self._last), emptiest)
        if loads.tokens[chosen] > int(loads.tokens[emptiest]) + self.lead:
            chosen = emptiest
        self._last |= dict.fromkeys(blocks, chosen)
        return chosen

    def _blocks(self, request: Request) -> list[int]:
        """Hash the prompt's whole blocks, each with all before it and the salt."""
        hashes: list[int] = []
        seen = hash(request.cache_salt)
        for stop in range(self.block_size, request.num_prompt_tokens + 1, self.block_size):
            seen = hash((seen, *request.token_ids(stop - self.block_size, stop)))
            hashes.append(seen)
        return hashes

    def __repr__(self) -> str:
        return f"PrefixAffinity(block_size={self.block_size}, lead={self.lead})"
