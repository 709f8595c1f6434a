"""What a model's linear layers take in while it reads texts and goes on writing them: `contbatch.quantize` needs it."""

import os
from collections.abc import Iterator, Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import require
from contbatch.export import read_config
from contbatch.fit import SAMPLE
from contbatch.observed import FOLDS, Observed, Observer
from contbatch.quantize import linear_inputs
from contbatch.runners.cpu import CPUModel
from contbatch.tokenizer import Tokenizer

PAGE_SIZE = 16
NUM_NEW = 96
"""Tokens that a model writes after each prompt of a calibration."""
BEGINNINGS = 4, 8, 16
"""Tokens of a paragraph that are prompts as well: what follows is the model's own."""
MAX_READ = 256
"""Tokens of several prompts that are read in one step: their logits are 50 MB."""


def paragraphs(name: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the paragraphs of a text of this package ("calibration" or "held_out") as token ids."""
    text = files("contbatch.texts").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [tokenizer.encode(paragraph) for paragraph in text.split("\n\n")]


def calibration_prompts(tokenizer: Tokenizer, bos_token_id: int | None) -> list[list[int]]:
    """Return the paragraphs to calibrate with and their beginnings, every other one after the token that begins a text.

    A model that has no such token gets them all as they are.
    """
    found = paragraphs("calibration", tokenizer)
    found = [*found, *(paragraph[:length] for length in BEGINNINGS for paragraph in found)]
    first = [] if bos_token_id is None else [bos_token_id]
    return [first + prompt if i % 2 == 0 else prompt for i, prompt in enumerate(found)]


def calibrate(
    path: str | os.PathLike[str], prompts: Sequence[Sequence[int]], num_new: int = 0, precision: str = "f32"
) -> dict[str, Observed]:
    """Have an exported float32 model read prompts, and go on with each: its own words cover more than a short text.

    Parameters
    ----------
    path : path
    prompts : sequence of sequence of int
        Read as far as the model's positions go. The first two are in the first of `FOLDS` parts of what is observed,
        the next two in the second, and so on, round and round; `contbatch.fit` needs two parts, so three prompts.
    num_new : int
        Tokens to draw after each, at temperature 1 (as in Liu et al. 2023, "LLM-QAT", section 3.1), always the same
        ones. None are where positions end.
    precision : {"f32", "bf16"}
        "bf16": half the time, for values that are to be rounded to 8 bits anyway. Pages are int8 then, as those of W8A8
        usually are, so that the attention kernel compiled for the one does for the other.

    Returns
    -------
    dict of str to Observed
        For each of `contbatch.quantize.linear_inputs`.

    Raises
    ------
    InvalidRequestError
        There is no prompt, or an empty one.
    """
    shortest = min(map(len, prompts), default=0)
    require(shortest >= 1, "length of the shortest prompt", shortest, "at least 1")
    config = read_config(path)
    prompts = [prompt[: config.max_position] for prompt in prompts]
    longest = max(map(len, prompts))
    num_new = min(num_new, config.max_position - longest)
    pages = -(-(longest + num_new) // PAGE_SIZE)
    tables = np.arange(len(prompts) * pages, dtype=np.int32).reshape(-1, pages)
    values = list(linear_inputs(config))
    names = [value.name for value in values] + [value.added_to for value in values if value.added_to] + ["logits"]
    total = sum(map(len, prompts)) + num_new * len(prompts)
    stride = total // SAMPLE | 1  # odd, or some of 64 prompts would always be passed over
    observers = {value.name: Observer(stride) for value in values}
    kv_dtype = "int8" if precision == "bf16" else None
    model = CPUModel(path, tables.size, PAGE_SIZE, precision=precision, kv_dtype=kv_dtype, observed=names)
    try:
        for seen, fold in _steps(model, prompts, tables, num_new):
            for value in values:
                observers[value.name].add(seen[value.name], fold, seen.get(value.added_to))
    finally:
        model.close()
    return {name: observer.observed() for name, observer in observers.items()}


def _steps(
    model: CPUModel, prompts: Sequence[Sequence[int]], tables: NDArray[np.int32], num_new: int
) -> Iterator[tuple[dict[str, NDArray[np.float32]], NDArray[np.int64]]]:
    """Read the prompts, some in a step, and write on to all together; yield what is observed, and each row's part."""
    rng, folds = np.random.default_rng(0), np.arange(len(prompts)) // 2 % FOLDS
    lengths, last = np.array([len(prompt) for prompt in prompts], np.int32), []
    for part in _groups(lengths):
        ends = np.insert(lengths[part].cumsum(dtype=np.int32), 0, 0)
        seen = model.observe(_step(np.concatenate(prompts[part]), ends, np.zeros_like(lengths[part]), tables[part]))
        last.append(_drawn(seen["logits"][ends[1:] - 1], rng))
        yield seen, np.repeat(folds[part], lengths[part])
    tokens, ends = np.concatenate(last), np.arange(len(prompts) + 1, dtype=np.int32)
    for i in range(num_new):
        seen = model.observe(_step(tokens, ends, lengths + np.int32(i), tables))
        tokens = _drawn(seen["logits"], rng)
        yield seen, folds


def _groups(lengths: NDArray[np.int32]) -> Iterator[slice]:
    """Cut a sequence of lengths into pieces of `MAX_READ` together at most, or of one."""
    start, total = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if i > start and total + length > MAX_READ:
            yield slice(start, i)
            start, total = i, 0
        total += length
    yield slice(start, len(lengths))


def _drawn(logits: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw a token from each row, at temperature 1."""
    drawn = []
    # One by one: what is in between stays cached.
    for row, uniform in zip(logits, rng.random(len(logits)), strict=True):
        sums = np.exp(row - row.max()).cumsum(dtype=np.float64)
        drawn.append(sums.searchsorted(uniform * sums[-1], side="right"))
    return np.array(drawn, np.int64)


def _step(
    tokens: NDArray[np.int64], ends: NDArray[np.int32], past: NDArray[np.int32], tables: NDArray[np.int32]
) -> dict[str, np.ndarray]:
    """Make a step that wants the logits of every token."""
    return {
        "input_ids": np.asarray(tokens, np.int64),
        "cumulative_sequence_length": ends,
        "past_seqlens": past,
        "block_table": tables,
        "logits_indices": np.arange(len(tokens)),
    }


def whole(prompt: Sequence[int]) -> dict[str, np.ndarray]:
    """Make a step of one sequence, from its beginning, that wants the logits of every token."""
    n = len(prompt)
    table = np.arange(-(-n // PAGE_SIZE), dtype=np.int32)[None]
    return _step(np.array(prompt, np.int64), np.array([0, n], np.int32), np.zeros(1, np.int32), table)
