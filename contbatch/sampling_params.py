"""How the tokens of a request are chosen, and when it ends. Standard library only."""

from dataclasses import dataclass, fields

from contbatch.checks import is_int, is_real, require


def _tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Immutable; bad values raise `InvalidRequestError`.

    Parameters
    ----------
    max_tokens : int
        Most output tokens, ≥ 1.
    temperature : float
        ≥ 0; 0 is greedy (the default, so that results repeat).
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all, values above the vocabulary size keep all.
    top_p : float
        Keep the smallest set of tokens whose probability reaches it (nucleus sampling, Holtzman 2020); in (0, 1].
    min_p : float
        Drop tokens less likely than this fraction of the likeliest (Nguyen et al. 2024); in [0, 1].
    seed : int or None
        Seed of this request's own random stream, 0 ≤ seed < 2**64; None lets the engine assign one.
    stop : str or tuple of str
        Generation ends when one of these appears in the text; it is cut off.
    stop_token_ids : int or tuple of int
        Generation ends when one of these is generated.
    ignore_eos : bool
        Go on past the model's end-of-sequence token.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer ≥ 1")
        require(
            is_real(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a finite number ≥ 0"
        )
        require(is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer ≥ -1")
        require(is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        seed_ok = self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**64)
        require(seed_ok, "seed", self.seed, "None or an integer in [0, 2**64)")
        object.__setattr__(self, "stop", _tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))
        require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        ids_ok = all(is_int(t) and t >= 0 for t in self.stop_token_ids)
        require(ids_ok, "stop_token_ids", self.stop_token_ids, "integers ≥ 0")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")

    def replace(self, **changes: object) -> "SamplingParams":
        """Return a copy with some fields changed; an unknown field raises `InvalidRequestError`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        unknown = sorted(set(changes) - set(values))
        require(not unknown, "the field to replace", ", ".join(unknown), f"one of {', '.join(values)}")
        return SamplingParams(**{**values, **changes})
