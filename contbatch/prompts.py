"""What callers may give as a prompt."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from contbatch.errors import InvalidRequestError
from contbatch.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
"""A conversation: {"role": "user", "content": "Hello"} and so on."""
Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a conversation that the model's chat template makes text of."""


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """List prompts; one prompt is a list of itself."""
    if isinstance(prompts, str):
        return [prompts]
    parts = list(prompts)
    return [parts] if parts and isinstance(parts[0], (SupportsIndex, Mapping)) else parts


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Make token ids of a prompt; `InvalidRequestError` if it is none."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    messages, ids = [], []
    for part in prompt:
        if isinstance(part, Mapping):
            messages.append(part)
        elif isinstance(part, SupportsIndex):  # numpy's integers too
            ids.append(index(part))
        else:
            raise InvalidRequestError(f"a prompt is text, token ids or a conversation, got {part!r} in it")
    if messages and ids:
        raise InvalidRequestError(f"a prompt is token ids or a conversation, got both: {ids[0]} and {messages[0]!r}")
    return tokenizer.encode(tokenizer.apply_chat_template(messages)) if messages else ids
