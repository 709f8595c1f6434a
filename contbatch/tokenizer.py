"""Text to token ids and back, whole or one token at a time."""

import codecs
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from contbatch.chat_template import ChatTemplate
from contbatch.errors import InvalidRequestError, ModelFileError
from contbatch.gguf_tokenizer import read_gguf
from contbatch.huggingface_tokenizer import read_huggingface
from contbatch.token_bytes import TokenBytes


class Tokenizer:
    """A model's tokenizer: byte-level BPE, or BPE with byte fallback as converted from SentencePiece.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        Splits and merges; decoding is done here, so that whole and incremental decoding cannot differ.
    source : str
        The file it comes from, for messages.
    bos_token_id, eos_token_id : int or None
        Tokens that begin and end a text.
    add_bos : bool
        `encode` begins every text with the former.
    chat_template : str or None
        Jinja source.

    Attributes
    ----------
    token_bytes : TokenBytes
        ``token_bytes[token_id]`` is the UTF-8 that a token stands for.

    Raises
    ------
    ModelFileError
        A special token is outside the vocabulary.
    UnsupportedModelError
        The backend decodes in another way.
    """

    def __init__(
        self,
        backend: Backend,
        source: str,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.source = source
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._backend = backend
        self._add_bos = add_bos
        self._template_text = chat_template
        for name, token in (("bos_token_id", bos_token_id), ("eos_token_id", eos_token_id)):
            if token is not None and not (isinstance(token, int) and 0 <= token < self.vocab_size):
                limit = f"below the vocabulary's {self.vocab_size}"
                raise ModelFileError(f"{source}: {name} must be an integer {limit}, got {token!r}")
        if add_bos and bos_token_id is None:
            raise ModelFileError(f"{source}: asks for a beginning-of-sequence token, but names none")
        self.token_bytes = TokenBytes(backend, source)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read the tokenizer of a GGUF file; raises `ModelFileError` or `UnsupportedModelError`."""
        backend, settings = read_gguf(Path(path).expanduser())
        return cls(backend, str(path), **settings)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read tokenizer.json, or the directory it is in, with tokenizer_config.json and chat_template.jinja beside it.

        Raises `ModelFileError` or `UnsupportedModelError`.
        """
        backend, settings = read_huggingface(Path(path).expanduser())
        return cls(backend, str(path), **settings)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens spelled out in it are recognised; a leading BOS is not doubled."""
        try:
            ids = self._backend.encode(text).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                f"only text of valid Unicode can be encoded, got {text!r:.80}: {error}"
            ) from error
        begin = [] if self.bos_token_id is None else [self.bos_token_id]
        if begin and ids[:2] == begin * 2:
            return ids[1:]
        return begin + ids if self._add_bos and ids[:1] != begin else ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes[token] for token in token_ids).decode("utf-8", "replace")
        return text.removeprefix(self.token_bytes.leading_space)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself: bytes that are no UTF-8 become U+FFFD, special tokens their names."""
        return self.token_bytes[token_id].decode("utf-8", "replace") or self._backend.id_to_token(token_id) or ""

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template_text is None:
            raise InvalidRequestError(f"{self.source} has no chat template: give the prompt as text")
        return ChatTemplate(self._template_text, self.source)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Turn messages into the prompt text this model was trained on.

        Parameters
        ----------
        messages : sequence of mapping
            Such as ``[{"role": "user", "content": "Hello"}]``.
        add_generation_prompt : bool
            End with the start of the assistant's answer.
        **variables
            Switches of the model's own template, such as `enable_thinking`.

        Raises
        ------
        InvalidRequestError
            The model has no template, the messages have another form, or the template refuses them.
        ModelFileError
            The template is malformed, fails, or tries what its sandbox forbids.
        """
        tokens = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        names = {name: "" if token is None else self._backend.id_to_token(token) for name, token in tokens.items()}
        settings = {"add_generation_prompt": add_generation_prompt, **names, **variables}
        return self._chat_template.render(messages, **settings)


class IncrementalDecoder:
    """Decodes one answer as its tokens arrive; what has been released never changes.

    Held back are the bytes of a character that is not complete, and text that may become a stop string. The work per
    token depends on the token and the stop strings, not on the length of the answer.

    Of several stop strings the one that starts first in the text wins; of those that start together the shortest,
    which is complete first. The result is therefore the same however the text is cut into tokens.

    Parameters
    ----------
    tokenizer : Tokenizer
    stop : sequence of str
        Non-empty stop strings; they are cut off, with everything after.
    min_tokens : int
        A stop string that is complete within the text of so many first tokens is no stop string (as in vLLM).

    Attributes
    ----------
    stopped : str or None
        The stop string that was hit. It may be known only a few tokens later, or at `flush`, when a longer one that
        started before it could still have been completed.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.stopped: str | None = None
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(string, str) and string for string in self._stop):
            raise InvalidRequestError(f"stop must be non-empty strings, got {stop!r}")
        self._token_bytes = tokenizer.token_bytes
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefix = tokenizer.token_bytes.leading_space
        """To be removed from the start of the text; empty once the text has begun."""
        self._held = ""
        self._exempt = 0
        """Characters of `_held` before whose end no stop string may end."""
        self._tokens_exempt = min_tokens
        self._released: list[str] = []
        self._ended = False

    @property
    def text(self) -> str:
        """All that has been released."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text it releases, "" once a stop string was hit.

        Raises `InvalidRequestError` after `flush`.
        """
        if self.stopped is not None:
            return ""
        if self._ended:
            raise InvalidRequestError(f"token {token_id} came after flush()")
        return self._take(self._token_bytes[token_id])

    def flush(self) -> str:
        """End the answer; returns the text that was still held back. An incomplete character becomes U+FFFD."""
        if self.stopped is not None or self._ended:
            return ""
        self._ended = True
        return self._take(b"")

    def _take(self, data: bytes) -> str:
        text = self._characters.decode(data, final=self._ended)
        if text and self._prefix:
            text, self._prefix = text.removeprefix(self._prefix), ""
        held = self._held + text
        if self._tokens_exempt > 0:
            self._tokens_exempt -= 1
            self._exempt = len(held)
        found = ((held.find(string, max(0, self._exempt - len(string) + 1)), string) for string in self._stop)
        start, string = min(
            (match for match in found if match[0] >= 0),
            key=lambda match: (match[0], len(match[1])),
            default=(len(held), None),
        )
        safe = start if self._ended else min(start, self._first_beginning(held))
        if safe == start:
            self.stopped = string
        released, self._held = held[:safe], held[safe:]
        self._exempt = max(0, self._exempt - safe)
        self._released.append(released)
        return released

    def _first_beginning(self, text: str) -> int:
        """Find the first position from which the rest of the text is the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(string.startswith(text[start:]) for string in self._stop if len(string) > len(text) - start):
                return start
        return len(text)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a GGUF file, of a tokenizer.json or of the directory it is in."""
    path = Path(path).expanduser()
    return Tokenizer.from_file(path) if path.is_dir() or path.suffix == ".json" else Tokenizer.from_gguf(path)
