"""How the tokens of a request are chosen, and when it ends. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass

from contbatch.checks import is_int, is_real, python_number, replaced, require, take_python_numbers


def _tuple(value: object) -> tuple[object, ...]:
    return tuple(map(python_number, value)) if isinstance(value, (tuple, list, set, frozenset)) else (value,)


def _is_bias(pair: object) -> bool:
    """Whether a pair is (token id, bias in [-100, 100])."""
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return False
    return is_int(pair[0], 0) and is_real(pair[1]) and -100 <= pair[1] <= 100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Immutable; bad values raise `InvalidRequestError`.

    Parameters
    ----------
    max_tokens : int
        Most output tokens, ≥ 1.
    n : int
        Answers to give to the prompt, ≥ 1, each drawn from a random stream of its own; greedy ones are all the same.
    best_of : int or None
        Answers to draw, ≥ n, of which the n with the largest cumulative log-probability are given (as in the first
        vLLM); None draws n. Ranking needs log-probabilities: if more than n are drawn, `logprobs` is at least 0.
    temperature : float
        ≥ 0; 0 is greedy (the default, so that results repeat).
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all, values above the vocabulary size keep all.
    top_p : float
        Keep the smallest set of tokens whose probability reaches it (nucleus sampling, Holtzman 2020); in (0, 1].
    min_p : float
        Drop tokens less likely than this fraction of the likeliest (Nguyen et al. 2024); in [0, 1].
    presence_penalty : float
        Subtracted from the logits of tokens that are in the output (OpenAI); in [-2, 2].
    frequency_penalty : float
        Subtracted as often as the token is in the output (OpenAI); in [-2, 2].
    repetition_penalty : float
        Divides positive and multiplies negative logits of tokens in prompt or output (Keskar 2019); > 0, 1 is none.
    logit_bias : mapping of int to float
        Added to the logits of these tokens, in [-100, 100] (OpenAI); stored as a tuple of (token id, bias).
    seed : int or None
        Seed of this request's own random stream, 0 ≤ seed < 2**64; None lets the engine assign one.
    stop : str or tuple of str
        Generation ends when one of these appears in the text; it is cut off.
    stop_token_ids : int or tuple of int
        Generation ends when one of these is generated.
    ignore_eos : bool
        Go on past the model's end-of-sequence token.
    min_tokens : int
        Output tokens before any end-of-sequence or stop token is generated, and before a stop string counts: one that
        is complete within their text is ignored; in [0, max_tokens].
    logprobs : int or None
        For each output token its log-probability and those of so many likeliest; -1 for all, None for none at all. They
        are of the model's own distribution, as by default in vLLM: whatever the other parameters are.
    prompt_logprobs : int or None
        The same for each prompt token from the second on.
    """

    max_tokens: int = 64
    n: int = 1
    best_of: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require(is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer ≥ 1")
        require(is_int(self.n, 1), "n", self.n, "an integer ≥ 1")
        best_of_ok = self.best_of is None or is_int(self.best_of, self.n)
        require(best_of_ok, "best_of", self.best_of, f"None or an integer ≥ n = {self.n}")
        require(
            is_real(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a finite number ≥ 0"
        )
        require(is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer ≥ -1")
        require(is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        self._check_penalties()
        seed_ok = self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**64)
        require(seed_ok, "seed", self.seed, "None or an integer in [0, 2**64)")
        object.__setattr__(self, "stop", _tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))
        require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        ids_ok = all(is_int(t) and t >= 0 for t in self.stop_token_ids)
        require(ids_ok, "stop_token_ids", self.stop_token_ids, "integers ≥ 0")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        limit = f"an integer in [0, max_tokens = {self.max_tokens}]"
        require(is_int(self.min_tokens, 0, self.max_tokens), "min_tokens", self.min_tokens, limit)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(count is None or is_int(count, -1), name, count, "None or an integer ≥ -1")
        if self.num_samples > self.n and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(is_real(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        value = self.repetition_penalty
        require(is_real(value) and value > 0, "repetition_penalty", value, "a finite number > 0")
        bias = tuple(self.logit_bias.items()) if isinstance(self.logit_bias, Mapping) else self.logit_bias
        if isinstance(bias, tuple):
            bias = tuple(tuple(map(python_number, pair)) if isinstance(pair, tuple) else pair for pair in bias)
        bias_ok = isinstance(bias, tuple) and all(map(_is_bias, bias))
        require(bias_ok, "logit_bias", self.logit_bias, "a mapping of token ids ≥ 0 to numbers in [-100, 100]")
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(bias).items())))

    @property
    def num_samples(self) -> int:
        """Answers drawn: `best_of`, or `n` without it."""
        return self.n if self.best_of is None else self.best_of

    def replace(self, **changes: object) -> "SamplingParams":
        """Return a copy with some fields changed; an unknown field raises `InvalidRequestError`."""
        return replaced(self, changes)
