"""The UTF-8 bytes that each token of a vocabulary stands for."""

import json
import re

from tokenizers import Tokenizer as Backend

from contbatch.errors import InvalidRequestError, UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def _byte_of_character() -> dict[str, int]:
    """Make the inverse of GPT-2's table, which gives each of the 256 bytes a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class TokenBytes:
    """Looks up, and remembers, what tokens stand for. Special tokens and ids beyond the vocabulary stand for nothing.

    Decoding through bytes, not through the library, lets whole and incremental decoding be the same thing.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        With the decoder of byte-level BPE (GPT-2) or the sequence that SentencePiece models are converted to.
    source : str
        The file it comes from; another decoder raises `UnsupportedModelError` with it.

    Attributes
    ----------
    leading_space : str
        What SentencePiece puts before a text, to be removed from the start of decoded text.
    """

    def __init__(self, backend: Backend, source: str) -> None:
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
        self._byte_level = decoder["type"] == "ByteLevel"
        if not self._byte_level and decoder.get("decoders") != _SENTENCEPIECE:
            raise UnsupportedModelError(f"{source}: decoder {decoder}; read are ByteLevel and SentencePiece's sequence")
        self.leading_space = "" if self._byte_level else " "
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        self._known = {token_id: b"" for token_id, token in added if token.special}

    def __getitem__(self, token_id: int) -> bytes:
        try:
            if token_id not in self._known:
                self._known[token_id] = self._spelled(self._backend.id_to_token(token_id) or "")
            return self._known[token_id]
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"a token id must be an integer ≥ 0, got {token_id!r}") from error

    def _spelled(self, token: str) -> bytes:
        if self._byte_level:
            known = all(character in _BYTE_OF_CHARACTER for character in token)
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token)) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
