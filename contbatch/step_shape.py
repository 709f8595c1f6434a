"""The size of a step in a few integers: all that a cost model sees of it. Standard library only."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from contbatch.step import DecodeSums, Grant


class StepShape(NamedTuple):
    """Sums over the grants of a step. A grant computes n tokens after `start` others, so it attends to start + n.

    The contract with `FastForward`: a cost model's seconds depend on nothing else. From one step to the next in which
    the same requests decode, `decode_context` alone grows, by a position for each of them (not for padding).
    """

    num_tokens: int
    """Rows of the linear layers: Σ n."""
    num_seqs: int
    """Grants."""
    num_logits: int
    """Rows of the last layer, the vocabulary's: grants that sample."""
    decode_context: int
    """Σ (start + 1) over grants of one token: positions whose keys and values are read, one query each."""
    prefill_context: int
    """Σ (start + n) over grants of more tokens: positions whose keys and values are read."""
    prefill_pairs: int
    """Σ n·(start + (n + 1)/2) over grants of more tokens: pairs of a query and a position it attends to."""
    shared_context: int = 0
    """Of `decode_context`, what another grant of the step reads too and is counted there: see `find_shared_context`."""

    @classmethod
    def of(
        cls,
        grants: "Iterable[Grant]",
        decoders: "DecodeSums | tuple[int, int]" = (0, 0),
        shared_context: int = 0,
    ) -> "StepShape":
        """Add up the grants of a step and who decodes besides; padding counts as what it computes."""
        tokens, decode_context = decoders
        seqs = logits = tokens
        prefill_context = prefill_pairs = 0
        for _, start, n, samples, _ in grants:
            seqs += 1
            tokens += n
            logits += samples
            if n == 1:
                decode_context += start + 1
            else:
                prefill_context += start + n
                prefill_pairs += n * (2 * start + n + 1) // 2
        return cls(tokens, seqs, logits, decode_context, prefill_context, prefill_pairs, shared_context)
