"""How likely a token was, in plain Python."""

from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token at one place, under the model's own distribution."""

    logprob: float
    """Natural logarithm of softmax(logits), before penalties, bias, masks, temperature and filters."""
    rank: int
    """1 for the likeliest; of equally likely tokens the lower id ranks first."""
    decoded_token: str | None = None
    """The token's text, special tokens by name; known only in a `RequestOutput`."""


Logprobs = dict[int, Logprob]
"""By token id: the token at this place, then the likeliest by rank (the token itself is not listed twice)."""
