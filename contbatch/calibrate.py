"""What a model's linear layers take in while it reads a text: the measurements that `contbatch.quantize` needs."""

import os
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from contbatch.export import read_config
from contbatch.quantize import linear_inputs
from contbatch.runners.cpu import CPUModel
from contbatch.tokenizer import Tokenizer

PAGE_SIZE = 16


def paragraphs(name: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the paragraphs of a text of this package ("calibration" or "held_out") as token ids."""
    text = files("contbatch.texts").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [tokenizer.encode(paragraph) for paragraph in text.split("\n\n")]


def calibration_prompts(tokenizer: Tokenizer, bos_token_id: int | None) -> list[list[int]]:
    """Return the paragraphs to calibrate with, every other one after the token that begins a text, if there is one."""
    found = paragraphs("calibration", tokenizer)
    first = [] if bos_token_id is None else [bos_token_id]
    return [first + prompt if i % 2 == 0 else prompt for i, prompt in enumerate(found)]


def calibrate(path: str | os.PathLike[str], prompts: Sequence[Sequence[int]]) -> dict[str, NDArray[np.float32]]:
    """Have an exported float32 model read prompts, each by itself and as far as its positions go.

    Returns
    -------
    dict of str to ndarray of float32, (num_tokens, width)
        The rows of all prompts for each of `contbatch.quantize.linear_inputs`.
    """
    config = read_config(path)
    names = [value.name for value in linear_inputs(config)]
    prompts = [prompt[: config.max_position] for prompt in prompts]
    rows: dict[str, list[NDArray[np.float32]]] = {name: [] for name in names}
    num_pages = -(-max(map(len, prompts)) // PAGE_SIZE)
    model = CPUModel(path, num_pages, PAGE_SIZE, observed=names)
    try:
        for prompt in prompts:
            for name, values in model.observe(whole(prompt)).items():
                rows[name].append(values)
    finally:
        model.close()
    return {name: np.concatenate(rows.pop(name)) for name in names}  # never all of them twice


def whole(prompt: Sequence[int]) -> dict[str, np.ndarray]:
    """Make a step of one sequence, from its beginning, that wants the logits of every token."""
    n = len(prompt)
    return {
        "input_ids": np.array(prompt, np.int64),
        "cumulative_sequence_length": np.array([0, n], np.int32),
        "past_seqlens": np.zeros(1, np.int32),
        "block_table": np.arange(-(-n // PAGE_SIZE), dtype=np.int32)[None],
        "logits_indices": np.arange(n),
    }
