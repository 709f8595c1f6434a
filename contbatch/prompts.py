"""What callers may give as a prompt."""

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import index
from typing import Any

from contbatch.checks import shown
from contbatch.errors import InvalidRequestError
from contbatch.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
"""A conversation: {"role": "user", "content": "Hello"} and so on."""
Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a conversation that the model's chat template makes text of."""


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """List prompts; one prompt is a list of itself. Raises `InvalidRequestError` for what can't be any."""
    if isinstance(prompts, str):
        return [prompts]
    each = parts(prompts)
    return [each] if each and (isinstance(each[0], Mapping) or _is_token(each[0])) else each


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Make token ids of a prompt; `InvalidRequestError` if it is none."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    messages, ids = [], []
    for part in parts(prompt):
        if isinstance(part, Mapping):
            messages.append(part)
        elif _is_token(part):
            ids.append(index(part))
        else:
            kind = type(prompt).__name__
            raise InvalidRequestError(f"a prompt is text, token ids or a conversation, got a {kind} with {part!r:.80}")
    if messages and ids:
        raise InvalidRequestError(f"a prompt is token ids or a conversation, got both: {ids[0]} and {messages[0]!r}")
    return tokenizer.encode(tokenizer.apply_chat_template(messages)) if messages else ids


def parts(prompt: Any) -> list[Any]:
    """List what a prompt, or an iterable of prompts, consists of."""
    if isinstance(prompt, (bytes, Mapping, Set)) or not isinstance(prompt, Iterable):  # a set has no order
        raise InvalidRequestError(f"a prompt is text, token ids or a conversation, got {shown(prompt):.80}")
    return list(prompt)


def _is_token(part: Any) -> bool:
    """Tell integers, numpy's too, from truth values, and from arrays, which have `__index__` as well."""
    if isinstance(part, bool):
        return False
    try:
        index(part)
    except TypeError:
        return False
    return True
