"""W8A8: linear layers whose weights and inputs are int8 codes, with what that costs kept small.

Weights get a step for each row, inputs one step for a whole layer, fixed beforehand: so a token's codes never depend on
who shares its batch. A few channels of the inputs are far larger than the rest; a factor per channel moves that size
into the weights beforehand, where rows are long enough to bear it (SmoothQuant: Xiao et al. 2023, equation 4). The
strength of the move, and how far the codes reach, are searched for each layer, on texts that the factors weren't made
from. A layer that stays bad keeps its floats: in many models the first token makes huge values in a few places (Sun et
al. 2024, "Massive activations"). How bad is too bad depends on what becomes of the output: next to what it is added to
it may be small.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import require
from contbatch.fit import LARGEST, Fit, fit
from contbatch.model import Model, ModelConfig
from contbatch.observed import Floats, Observed

MAX_ERROR = 0.0012
"""Relative squared error of a layer's output above which it stays in floats."""
MAX_ERROR_OF_SUM = 0.006
"""The same in relation to the sum that outputs are added to, for as many of them as a model has layers: they add up."""
LAST = 15
"""Of so many layers the last one keeps the input of `down` in floats: an error so late changes the logits more than its
size says."""


@dataclass(frozen=True, slots=True)
class LinearInput:
    """A value that linear layers take."""

    name: str
    """As in the graph that `contbatch.graph.decoder` makes."""
    users: tuple[str, ...]
    """Weights that it is multiplied with, (rows, width) each."""
    scaled_in: str
    """The weight in whose rows a factor per channel can be hidden: a norm's, or that of the layer before."""
    added_to: str = ""
    """The sum that the layer's output becomes a part of, if that is all that becomes of it."""
    max_error: float = MAX_ERROR
    """`Fit.error` above which the layer stays in floats."""


def linear_inputs(config: ModelConfig) -> Iterator[LinearInput]:
    """Yield the inputs of all linear layers, in the order they are computed."""
    share = MAX_ERROR_OF_SUM / config.num_layers
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        yield LinearInput(f"{layer}attn_norm", (f"{layer}q", f"{layer}k", f"{layer}v"), f"{layer}attn_norm")
        yield LinearInput(f"{layer}attention", (f"{layer}o",), f"{layer}v", f"{layer}attn_residual", share)
        yield LinearInput(f"{layer}mlp_norm", (f"{layer}gate", f"{layer}up"), f"{layer}mlp_norm")
        early = i < config.num_layers - config.num_layers // LAST
        allowed = share if early else 0.0
        yield LinearInput(f"{layer}gated", (f"{layer}down",), f"{layer}up", f"{layer}mlp_residual", allowed)
    yield LinearInput("final_norm", ("embed" if config.tie_word_embeddings else "lm_head",), "final_norm")


def int8_codes(weights: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round weights (rows, columns) to codes in [-127, 127] and a step for each row, (rows,): weight ≈ code · step."""
    steps = np.abs(weights).max(axis=1) / np.float32(LARGEST)
    steps[steps == 0] = 1
    return np.rint(weights / steps[:, None]).astype(np.int8), steps


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model with its factors moved, and which of its layers take 8 bits."""

    model: Model
    """Computes the same as the one it was made from, up to rounding; its head is its own."""
    steps: Mapping[str, float]
    """By name of the value in the graph; what is missing stays in floats."""
    errors: Mapping[str, float]
    """Relative squared error of the output of the layers that take a value, see `Fit.error`, for every value."""

    @classmethod
    def of(cls, model: Model, observed: Mapping[str, Observed], keep: Sequence[str] = ()) -> Self:
        """Quantise a model.

        Parameters
        ----------
        model : Model
        observed : mapping of str to Observed
            Values of the float32 graph, for each of `linear_inputs`.
        keep : sequence of str
            Values that stay in floats, besides those with an error above their `max_error`.

        Raises
        ------
        InvalidRequestError
            A value is missing, not finite, or `keep` has an unknown one.
        """
        config, weights = model.config, model.weights
        inputs = list(linear_inputs(config))
        names = [value.name for value in inputs]
        for known, wanted in ((observed, names), (names, keep)):
            for name in wanted:
                require(name in known, "value", name, f"one of {', '.join(sorted(known)[:4])}, …")
        by_row: dict[str, Floats] = {}
        by_column: dict[str, Floats] = {}
        steps: dict[str, float] = {}
        errors: dict[str, float] = {}
        group = config.num_heads // config.kv_num_heads

        def sizes(value: LinearInput) -> tuple[int, int]:
            return (group, config.head_size) if value.name.endswith(".attention") else (1, 1)

        def fitted(value: LinearInput) -> Fit:
            with np.errstate(over="ignore", invalid="ignore"):  # an error that is no number keeps a layer in floats
                return fit(observed[value.name], np.concatenate([weights[name] for name in value.users]), *sizes(value))

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets go of Python's lock
            fits = list(pool.map(fitted, inputs))
        for value, found in zip(inputs, fits, strict=True):
            errors[value.name] = found.error
            if not found.error <= value.max_error or value.name in keep:
                continue
            steps[value.name] = found.step
            users = ("lm_head",) if value.users == ("embed",) else value.users
            by_column |= dict.fromkeys(users, found.factor)
            if sizes(value) != (1, 1):  # every query head of a group has the factors of their value head
                found = replace(found, factor=found.factor.reshape(-1, group, config.head_size)[:, 0].reshape(-1))
            by_row[value.scaled_in] = found.factor
        scaled = ScaledWeights(model, by_row, by_column)
        packed = {name: held for name, held in model.packed.items() if name == "embed"}  # the rest runs in bfloat16
        config = replace(config, tie_word_embeddings=False)
        return cls(Model(config, scaled, model.source, packed), steps, errors)


class ScaledWeights(Mapping[str, Floats]):
    """Weights of a model, rows divided and columns multiplied when they are read; a tied head becomes a weight."""

    def __init__(self, model: Model, by_row: Mapping[str, Floats], by_column: Mapping[str, Floats]) -> None:
        self._model, self._by_row, self._by_column = model, by_row, by_column
        self._names = list(model.weights) + ["lm_head"] * model.config.tie_word_embeddings

    def __getitem__(self, name: str) -> Floats:
        tied = name == "lm_head" and self._model.config.tie_word_embeddings
        array = self._model.weights["embed" if tied else name]
        row, column = self._by_row.get(name), self._by_column.get(name)
        bias = name.removesuffix("_bias")
        if bias != name:
            row = self._by_row.get(bias)
        if row is not None:
            array = array / (row if array.ndim == 1 else row[:, None])
        return array if column is None else array * column

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
