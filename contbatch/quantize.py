"""W8A8: linear layers whose weights and inputs are int8 codes, with what that costs kept small.

Weights get a step for each row, inputs one step for a whole layer, fixed beforehand: so a token's codes never depend on
who shares its batch. A few channels of the inputs are far larger than the rest; a factor per channel moves that size
into the weights beforehand, where rows are long enough to bear it (SmoothQuant: Xiao et al. 2023, equation 4). The
strength of the move, and how far the codes reach, are searched for each layer, on texts that the factors weren't made
from. A layer that stays bad
keeps its floats: in many models the first token makes huge values in a few places (Sun et al. 2024, "Massive
activations"). How bad is too bad depends on what becomes of the output: next to what it is added to it may be small.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import require
from contbatch.model import Model, ModelConfig
from contbatch.observed import Floats, Observed

LARGEST = 127
STRENGTHS = 0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0
"""Exponents of SmoothQuant to choose from: 0 moves as little as the weights want, 1 makes all channels alike."""
REACHES = 1.0, 0.8, 0.65, 0.5
"""Shares of the largest value observed that the codes may reach: what lies beyond is cut off."""
MAX_ERROR = 0.0012
"""Relative squared error of a layer's output above which it stays in floats."""
MAX_ERROR_OF_SUM = 0.006
"""The same in relation to the sum that outputs are added to, for as many of them as a model has layers: they add up."""
SAMPLE = 256
"""Tokens on which a fit is tried."""
ROWS = 512
"""Rows of the weights that it is tried with; more take longer and choose alike."""


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
        yield LinearInput(f"{layer}gated", (f"{layer}down",), f"{layer}up", f"{layer}mlp_residual", share)
    yield LinearInput("final_norm", ("embed" if config.tie_word_embeddings else "lm_head",), "final_norm")


@dataclass(frozen=True, slots=True)
class Fit:
    """How well an input goes into 8 bits."""

    factor: Floats
    """(width,) what each channel is divided by."""
    step: float
    """Distance between two codes."""
    error: float
    """‖output with codes - output‖² / ‖output or sum‖², mean of the tokens: one huge token can't hide the others."""


def int8_codes(weights: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round weights (rows, columns) to codes in [-127, 127] and a step for each row, (rows,): weight ≈ code · step."""
    steps = np.abs(weights).max(axis=1) / np.float32(LARGEST)
    steps[steps == 0] = 1
    return np.rint(weights / steps[:, None]).astype(np.int8), steps


def fit(seen: Observed, weights: Floats, group: int = 1, head_size: int = 1) -> Fit:
    """Find the factors and the step for an input that is multiplied with `weights`.

    Parameters
    ----------
    seen : Observed
    weights : ndarray of float32, (rows, width)
    group, head_size : int
        Heads that must share their factors, and channels of a head: query heads of a group share a value head.

    Raises
    ------
    InvalidRequestError
        Nothing was observed, or values that aren't finite.
    """
    finite = bool(seen.sample.size and np.isfinite(seen.largest).all())
    require(finite, "observed values", seen.sample.shape, "finite, of a token in each half at least")
    largest_weights = np.abs(weights).max(axis=0) + np.float32(1e-6)

    def scaled(largest: Floats, strength: float) -> tuple[Floats, float]:
        factor = (largest + np.float32(1e-6)) ** strength / largest_weights ** (1 - strength)
        by_head = factor.reshape(-1, group, head_size)
        factor = np.broadcast_to(by_head.max(axis=1, keepdims=True), by_head.shape).reshape(-1)
        factor = (factor / np.exp(np.log(factor).mean())).astype(np.float32)
        return factor, float((largest / factor).max()) / LARGEST or 1.0  # where all inputs are 0

    sample, tried = seen.sample[:: -(-len(seen.sample) // SAMPLE)], weights[:: -(-len(weights) // ROWS)]
    wanted = sample @ tried.T
    sizes = np.square(wanted).sum(axis=1)
    if seen.sizes is not None:
        sizes = seen.sizes[:: -(-len(seen.sample) // SAMPLE)] * np.float32(len(tried) / len(weights))
    errors: dict[tuple[float, float], float] = {}
    for strength in STRENGTHS:
        factor, step = scaled(seen.largest[0], strength)
        codes, steps = int8_codes(tried * factor)
        rounded = codes * steps[:, None]
        for reach in REACHES:
            squares = np.square(_in_steps(sample / factor, step * reach) @ rounded.T - wanted).sum(axis=1)
            errors[strength, reach] = float(np.mean(squares / np.maximum(sizes, np.finfo(np.float32).tiny)))
    strength, reach = min(errors, key=lambda choice: errors[choice])
    factor, step = scaled(seen.largest.max(axis=0), strength)
    return Fit(factor, step * reach, errors[strength, reach])


def _in_steps(inputs: Floats, step: float) -> Floats:
    """Round to the codes of 8 bits and widen again, as QuantizeLinear and DequantizeLinear do."""
    codes: Floats = np.clip(np.rint(inputs / np.float32(step)), -LARGEST - 1, LARGEST)
    return codes * np.float32(step)


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
        for value in inputs:
            sizes = (group, config.head_size) if value.name.endswith(".attention") else (1, 1)
            found = fit(observed[value.name], np.concatenate([weights[user] for user in value.users]), *sizes)
            errors[value.name] = found.error
            if found.error > value.max_error or value.name in keep:
                continue
            steps[value.name] = found.step
            users = ("lm_head",) if value.users == ("embed",) else value.users
            by_column |= dict.fromkeys(users, found.factor)
            if sizes != (1, 1):  # every query head of a group has the factors of their value head
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
