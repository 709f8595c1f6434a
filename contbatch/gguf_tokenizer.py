"""The byte-level BPE tokenizer that a GGUF file carries in its metadata."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.gguf_file import GGUFFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before BPE: each pattern in turn isolates its matches within the pieces so far."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken whole."""
    add_bos: bool = False
    """Used where the file doesn't say."""
    nfc: bool = False
    """Unicode is composed first."""


_FALCON_LIKE = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_LIKE = _PreTokenizer((_GPT2,))
_SINGLE_DIGITS = _PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_LIKE = _PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True)
_QWEN2_LIKE = _PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True)

# The file only names the pre-tokenizer. Patterns: the tokenizer.json of the model each is named after, and
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp for what the names stand for.
_PRE_TOKENIZERS = {
    "default": _FALCON_LIKE,
    "gpt-2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_LIKE,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "qwen2": _QWEN2_LIKE,
}
# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def read_gguf(path: Path) -> tuple[Backend, dict[str, Any]]:
    """Read the tokenizer of a GGUF file.

    Returns
    -------
    backend : tokenizers.Tokenizer
    settings : dict
        Keyword arguments of `contbatch.tokenizer.Tokenizer`.

    Raises
    ------
    ModelFileError
        The file or its vocabulary is missing or contradicts itself.
    UnsupportedModelError
        Not a byte-level BPE ("gpt2"), or its pre-tokenizer is unknown.
    """
    file = GGUFFile(path)
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(f"{path}: tokenizer.ggml.model = {kind!r}; only 'gpt2' (byte-level BPE) is read")
    cut, template = _pre_tokenizer(file), metadata.get("tokenizer.chat_template")
    return _backend(file, cut), {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "add_bos": bool(metadata.get("tokenizer.ggml.add_bos_token", cut.add_bos)),
        "chat_template": template if isinstance(template, str) else None,
    }


def _pre_tokenizer(file: GGUFFile) -> _PreTokenizer:
    """Look up tokenizer.ggml.pre; a name that isn't known raises `UnsupportedModelError`, absence means "default"."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.pre = {name!r}; known are {known}")
    return _PRE_TOKENIZERS[name]


def _backend(file: GGUFFile, cut: _PreTokenizer) -> Backend:
    tokens = _entries(file, "tokens", str)
    types = _entries(file, "token_type", int) if "tokenizer.ggml.token_type" in file.metadata else [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocabulary) != len(tokens):
        counts = f"{len(tokens)} tokens, {len(vocabulary)} of them different, {len(types)} token types"
        raise ModelFileError(f"{file.path}: malformed vocabulary: {counts}")
    merges = [tuple(merge.split(" ", 1)) for merge in _entries(file, "merges", str)]
    try:
        backend = Backend(BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    except Exception as error:  # The library raises plain Exception.
        raise ModelFileError(f"{file.path}: malformed merges: {error}") from error
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = ByteLevelDecoder()
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(_added(tokens, types, (_UNKNOWN, _CONTROL)))
    backend.add_tokens(_added(tokens, types, (_USER_DEFINED,)))
    return backend


def _added(tokens: Sequence[str], types: Sequence[int], kinds: tuple[int, ...]) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds and token
    ]


def _entries(file: GGUFFile, key: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}")
    return values
