"""Small tokenizers made in code: byte-level BPE, and BPE with byte fallback as converted from SentencePiece."""

import gguf
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

BOS, EOS = "<|begin|>", "<|end|>"
# Tokens that end, begin or lie inside a character: 😀 is F0 9F 98 80, é is C3 A9.
MERGES = [tuple(merge.split()) for merge in ("Ġ t", "h e", "Ġt he", "ð Ł", "a ð", "Ģ b", "1 2", "12 3", "123 4")]
TOKENS = (
    sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in MERGES] + [BOS, EOS, "<tool>", "x y"]
)


def byte_level():
    """256 bytes, a few merges, two special tokens and two that are added but not special."""
    backend = Backend(BPE({token: i for i, token in enumerate(TOKENS)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(EOS, normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("x y", normalized=False)])
    return backend


def sentencepiece():
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", BOS, EOS)])
    return backend


def write_tokenizer_gguf(path, **changes):
    """The byte-level one as GGUF metadata; `changes` replace keys of tokenizer.ggml, None leaves one out."""
    special, user = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    types = {BOS: special, EOS: special, "<tool>": user, "x y": user}
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [int(types.get(token, gguf.TokenType.NORMAL)) for token in TOKENS],
        "merges": [" ".join(merge) for merge in MERGES],
        "bos_token_id": TOKENS.index(BOS),
        "eos_token_id": TOKENS.index(EOS),
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            kinds[type(value)]("tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
