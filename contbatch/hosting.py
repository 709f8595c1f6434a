"""Arithmetic of who pays less: to rent GPUs by the hour, or to pay an API by the token. In any one currency."""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from contbatch.checks import is_int, is_real, replaced, require, require_positive, take_python_numbers
from contbatch.errors import PriceError

_require = partial(require, error=PriceError)
SECONDS_A_DAY = 86_400
MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices; the defaults are round numbers to be changed, not those of any offer.

    Parameters
    ----------
    gpu_hour : float
        Of a GPU, rented or owned and written off, with all that it needs: > 0.
    gpus : int
        In a server: what one replica of the model runs on.
    api_prompt, api_output : float
        Of a million tokens of prompts, and of answers: ≥ 0, one of them > 0.
    """

    gpu_hour: float = 2.0
    gpus: int = 1
    api_prompt: float = 0.2
    api_output: float = 0.6

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(PriceError, gpu_hour=self.gpu_hour)
        _require(is_int(self.gpus, 1), "gpus", self.gpus, "an integer ≥ 1")
        for name in ("api_prompt", "api_output"):
            value = getattr(self, name)
            _require(is_real(value) and value >= 0, name, value, "a finite number ≥ 0")
        _require(self.api_prompt + self.api_output > 0, "api_prompt and api_output", 0, "not both 0")

    def replace(self, **changes: Any) -> "Prices":
        """Return a copy with some fields changed; an unknown field raises `PriceError`."""
        return replaced(self, changes, PriceError)

    @property
    def server_day(self) -> float:
        """What a server costs a day, whether or not anybody asks it anything."""
        return 24 * self.gpu_hour * self.gpus

    def api_request(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return what an API takes for a request of so many tokens (means)."""
        asked = require_positive(PriceError, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        return (asked[0] * self.api_prompt + asked[1] * self.api_output) / MILLION

    def million_tokens(self, tokens_per_s: float, utilisation: float = 1.0) -> float:
        """Return what a million tokens cost on one's own server.

        Parameters
        ----------
        tokens_per_s : float
            Of the server when it serves as many as it can: prompts and answers, or answers only, as one likes to count.
        utilisation : float
            Share of these that somebody asks for, in (0, 1].
        """
        tokens_per_s, utilisation = require_positive(PriceError, tokens_per_s=tokens_per_s, utilisation=utilisation)
        _require(utilisation <= 1, "utilisation", utilisation, "in (0, 1]")
        return self.gpu_hour * self.gpus / (3600 * tokens_per_s * utilisation) * MILLION

    def break_even(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the requests a day from which on one server costs less than the API, if it can serve them."""
        return self.server_day / self.api_request(prompt_tokens, output_tokens)

    def host_day(self, requests_per_day: float, capacity_per_s: float) -> float:
        """Return what hosting costs a day: as many servers as the requests need, if they come evenly.

        Parameters
        ----------
        requests_per_day : float
            > 0.
        capacity_per_s : float
            Requests per second that one server serves within what was promised: see `find_capacity`.
        """
        each = require_positive(PriceError, requests_per_day=requests_per_day, capacity_per_s=capacity_per_s)
        return self.server_day * ceil(each[0] / (SECONDS_A_DAY * each[1]))
