"""A scheduled step as the int arrays that a model step takes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from contbatch.errors import RunnerError
from contbatch.request import Request
from contbatch.samples import unforked
from contbatch.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arrays of one ragged batch; sequences in the order of the step's grants, tokens of each side by side."""

    input_ids: NDArray[np.int64]
    """(num_tokens,)"""
    cumulative_sequence_length: NDArray[np.int32]
    """(num_seqs + 1,) where each sequence's new tokens begin and end"""
    past_seqlens: NDArray[np.int32]
    """(num_seqs,) tokens already in pages"""
    block_table: NDArray[np.int32]
    """(num_seqs, max_pages) page ids, -1 where unmapped"""
    logits_indices: NDArray[np.int64]
    """(num_logits,) rows of the batch whose logits are wanted: those of `scored`, then one for each `sampled`"""
    scored: list[tuple[Request, range]]
    """Prompts whose log-probabilities are wanted: the logits of these positions, each telling of the token after it"""
    sampled: list[Request]
    """The requests that get a token from their logits; of a prompt with several samples all, from the same row"""

    def feed(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, as an exported model takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sampled", "scored")}


TYPES: dict[str, tuple[np.dtype[np.integer], int]] = {
    "input_ids": (np.dtype(np.int64), 1),
    "cumulative_sequence_length": (np.dtype(np.int32), 1),
    "past_seqlens": (np.dtype(np.int32), 1),
    "block_table": (np.dtype(np.int32), 2),
    "logits_indices": (np.dtype(np.int64), 1),
}
"""Dtype and number of dimensions of the arrays that a model step takes."""


def require_valid(inputs: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Raise `RunnerError` for a missing array, another dtype or number of dimensions, or a value out of range.

    The range is that of token ids and of rows of logits; of the other three arrays the operator checks the values.
    """
    for name, (dtype, ndim) in TYPES.items():
        array = inputs.get(name)
        if not isinstance(array, np.ndarray) or (array.dtype, array.ndim) != (dtype, ndim):
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else f"{array!r:.80}"
            raise RunnerError(f"{name} must be an array of {dtype} with {ndim} dimension(s), got {found}")
    for name, limit in (("input_ids", vocab_size), ("logits_indices", len(inputs["input_ids"]))):
        for value in inputs[name][(inputs[name] < 0) | (inputs[name] >= limit)][:1]:
            raise RunnerError(f"{name} must be in [0, {limit}), got {value}")


def padded(inputs: Mapping[str, np.ndarray], size: int, width: int) -> dict[str, np.ndarray]:
    """Pad a step to `size` tokens, sequences and rows of logits, and a block table of `width` columns.

    Tokens added belong to no sequence and sequences added have no tokens, so a kernel reads and writes no page for
    either. Rows of logits added are row 0.
    """
    cumulative, table = inputs["cumulative_sequence_length"], inputs["block_table"]
    rows, columns = table.shape
    new = {
        "cumulative_sequence_length": np.pad(cumulative, (0, size + 1 - len(cumulative)), mode="edge"),
        "block_table": np.pad(table, ((0, size - rows), (0, width - columns)), constant_values=-1),
    }
    return {name: new[name] if name in new else np.pad(inputs[name], (0, size - len(inputs[name]))) for name in TYPES}


def without_single_rows(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Repeat a step's only token, or only row of logits; the token added belongs to no sequence.

    Libraries multiply a single row in an order of their own, so that its bits would tell who was alone.
    """
    rows = ("input_ids", "logits_indices")
    return {**inputs, **{name: np.repeat(inputs[name], 2) for name in rows if len(inputs[name]) == 1}}


def pack(step: SchedulerOutput) -> StepInputs:
    """Pack the grants of a step, in their order.

    Raises
    ------
    InvalidRequestError
        A request has only a length in place of `prompt_token_ids`.
    """
    input_ids: list[int] = []
    ends, past, last, sampled = [0], [], [], []
    scored: list[tuple[Request, range]] = []
    scored_rows: list[int] = []
    for request, start, num_tokens, samples, _ in step.grants:
        input_ids += request.token_ids(start, start + num_tokens)
        if positions := request.unscored_prompt_rows(start, start + num_tokens):
            scored.append((request, positions))
            scored_rows += [ends[-1] + position - start for position in positions]
        ends.append(len(input_ids))
        past.append(start)
        if samples:
            last.append(len(input_ids) - 1)
            sampled.append(request)
            for child in unforked(request) if request.children else ():
                last.append(len(input_ids) - 1)
                sampled.append(child)
    pages = [grant.request.pages for grant in step.grants]
    table = np.full((len(pages), max(map(len, pages), default=0)), -1, np.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = ids
    return StepInputs(
        input_ids=np.array(input_ids, np.int64),
        cumulative_sequence_length=np.array(ends, np.int32),
        past_seqlens=np.array(past, np.int32),
        block_table=table,
        logits_indices=np.array(scored_rows + last, np.int64),
        scored=scored,
        sampled=sampled,
    )
