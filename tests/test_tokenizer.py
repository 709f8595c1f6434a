import json

import pytest
import smollm2
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BOS, EOS, TOKENS, byte_level, sentencepiece, write_tokenizer_gguf
from tokenizers import decoders

from contbatch.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from contbatch.tokenizer import Tokenizer, load_tokenizer

BYTES, PIECES = byte_level(), sentencepiece()
BEGIN, END, TOOL = (TOKENS.index(token) for token in (BOS, EOS, "<tool>"))
TEXT = st.text(st.sampled_from("ab é😀the12\n") | st.characters(exclude_categories=["Cs"]), max_size=30)


def ids(size):
    return st.lists(st.integers(0, size + 5), max_size=40)


@settings(deadline=None)
@given(ids(len(TOKENS)))
def test_byte_level_decode_is_the_librarys(token_ids):
    assert Tokenizer(BYTES, "t").decode(token_ids) == BYTES.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None)
@given(TEXT)
def test_sentencepiece_decode_is_the_librarys(text):
    tokenizer = Tokenizer(PIECES, "t")
    token_ids = tokenizer.encode(text)
    assert token_ids == PIECES.encode(text).ids
    assert tokenizer.decode(token_ids) == PIECES.decode(token_ids) == text


@settings(deadline=None)
@given(TEXT)
def test_round_trip(text):
    tokenizer = Tokenizer(BYTES, "t")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens():
    tokenizer = Tokenizer(BYTES, "t", bos_token_id=BEGIN, eos_token_id=END)
    assert tokenizer.encode(f"a{EOS}<tool>b") == [TOKENS.index("a"), END, TOOL, TOKENS.index("b")]
    assert tokenizer.decode(tokenizer.encode(f"{BOS}a{EOS}<tool>b")) == "a<tool>b"
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text", ["ab", f"{BOS}ab", f"{BOS}{BOS}ab"])
def test_one_bos_where_it_is_asked_for(text):
    tokenizer = Tokenizer(BYTES, "t", bos_token_id=BEGIN, add_bos=True)
    assert tokenizer.encode(text) == [BEGIN, TOKENS.index("a"), TOKENS.index("b")]
    assert tokenizer.encode("") == [BEGIN]


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["list"], "lone surrogate \ud83d"])
def test_encode_refuses(text):
    with pytest.raises(InvalidRequestError, match=r"only text of valid Unicode .*, got "):
        Tokenizer(BYTES, "t").encode(text)


@pytest.mark.parametrize("token", [-1, 2**70, "a", 1.5, None, [1]])
def test_decode_refuses(token):
    with pytest.raises(InvalidRequestError, match=r"a token id must be an integer ≥ 0, got "):
        Tokenizer(BYTES, "t").decode([65, token])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bos_token_id": 999}, "bos_token_id must be an integer below the vocabulary's 269, got 999"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"add_bos": True}, "names none"),
    ],
)
def test_constructor_refuses(settings, message):
    with pytest.raises(ModelFileError, match=f"the source.*{message}"):
        Tokenizer(BYTES, "the source", **settings)


def test_other_decoders_are_refused():
    for decoder in (None, decoders.WordPiece(), decoders.Metaspace()):
        backend = byte_level()
        backend.decoder = decoder
        with pytest.raises(UnsupportedModelError, match="the source: decoder"):
            Tokenizer(backend, "the source")


class TestHuggingFace:
    def write(self, folder, config=None, backend=None):
        (backend or byte_level()).save(str(folder / "tokenizer.json"))
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def test_directory_and_file_alike(self, tmp_path):
        config = {"bos_token": BOS, "eos_token": {"content": EOS, "special": True}, "add_bos_token": True}
        self.write(tmp_path, config)
        for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
            tokenizer = load_tokenizer(path)
            assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BEGIN, END)
            assert tokenizer.encode("a") == [BEGIN, TOKENS.index("a")]

    def test_without_configuration(self, tmp_path):
        tokenizer = load_tokenizer(self.write(tmp_path))
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
        assert tokenizer.encode("a") == [TOKENS.index("a")]

    def test_truncation_and_padding_of_the_file_are_off(self, tmp_path):
        backend = byte_level()
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
        tokenizer = load_tokenizer(self.write(tmp_path, backend=backend))
        assert len(tokenizer.encode("q" * 6)) == 6

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"bos_token": "<s>"}, r"tokenizer_config\.json: names the special token '<s>'"),
            ({"eos_token": 3}, "names the special token 3"),
            ({"chat_template": 3}, "chat_template must be text"),
            ([], "list, not an object"),
        ],
    )
    def test_bad_configuration(self, tmp_path, config, message):
        with pytest.raises(ModelFileError, match=message):
            load_tokenizer(self.write(tmp_path, config))

    def test_bad_files(self, tmp_path):
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: no such file"):
            load_tokenizer(tmp_path)
        data = (self.write(tmp_path) / "tokenizer.json").read_bytes()
        for length in range(0, len(data), 97):
            (tmp_path / "tokenizer.json").write_bytes(data[:length])
            with pytest.raises(ModelFileError, match=r"tokenizer\.json: not a tokenizer\.json"):
                load_tokenizer(tmp_path)


SAMPLE = "I'll IT'S 12345 x\n\n  y!\n"
SPLITS = {
    "gpt-2": ["I", "'ll", " IT", "'", "S", " 12345", " x", "\n\n ", " y", "!", "\n"],
    "smollm": ["I", "'ll", " IT", "'", "S", " ", *"12345", " x", "\n\n ", " y", "!", "\n"],
    "llama-bpe": ["I", "'ll", " IT", "'S", " ", "123", "45", " x", "\n\n", " ", " y", "!\n"],
    "qwen2": ["I", "'ll", " IT", "'S", " ", *"12345", " x", "\n\n", " ", " y", "!\n"],
    "default": ["I", "'", "ll", " IT", "'", "S", " ", "123", "45", " x", "\n\n ", " y", "!", "\n"],
}


class TestGGUF:
    def test_like_the_original(self, tmp_path):
        tokenizer = load_tokenizer(write_tokenizer_gguf(tmp_path / "t.gguf"))
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (BEGIN, END, len(TOKENS))
        for text in ("the the 😀 a😀b", f"{BOS}x<tool>x y{EOS}", "1234 'll é\n\n"):
            token_ids = BYTES.encode(text).ids
            assert tokenizer.encode(text) == token_ids
            assert tokenizer.decode(token_ids) == BYTES.decode(token_ids)

    @pytest.mark.parametrize("pre", SPLITS)
    def test_pre_tokenizers(self, pre, tmp_path):
        tokenizer = load_tokenizer(write_tokenizer_gguf(tmp_path / "t.gguf", pre=pre))
        pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(SAMPLE)
        assert [SAMPLE[start:end] for _, (start, end) in pieces] == SPLITS[pre]

    def test_what_else_a_pre_tokenizer_says(self, tmp_path):
        plain = load_tokenizer(write_tokenizer_gguf(tmp_path / "p.gguf", pre=None, merges=["ð Ł"]))
        llama = load_tokenizer(write_tokenizer_gguf(tmp_path / "l.gguf", pre="llama-bpe", merges=["ð Ł"]))
        qwen = load_tokenizer(write_tokenizer_gguf(tmp_path / "q.gguf", pre="qwen2", merges=["ð Ł"]))
        assert len(plain.encode("he")) == 2
        assert llama.encode("he") == [BEGIN, TOKENS.index("he")]
        assert plain.encode("e\u0301") != plain.encode("\u00e9")
        assert qwen.encode("e\u0301") == qwen.encode("\u00e9")

    def test_the_file_says_whether_bos_is_added(self, tmp_path):
        for pre, add, first in [("llama-bpe", False, 0), ("gpt-2", True, 1), ("gpt-2", None, 0)]:
            path = write_tokenizer_gguf(tmp_path / "t.gguf", pre=pre, add_bos_token=add)
            assert load_tokenizer(path).encode("a")[:first] == [BEGIN] * first

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"pre": "tekken"}, UnsupportedModelError, r"tokenizer\.ggml\.pre = 'tekken'; known are default, gpt-2"),
            ({"model": "llama"}, UnsupportedModelError, r"tokenizer\.ggml\.model = 'llama'; only 'gpt2'"),
            ({"model": None}, UnsupportedModelError, "= None"),
            ({"tokens": None}, ModelFileError, r"tokenizer\.ggml\.tokens is missing"),
            ({"tokens": [1, 2]}, ModelFileError, "not a list of str"),
            ({"tokens": ["a", "a"], "token_type": [1, 1]}, ModelFileError, "2 tokens, 1 of them different"),
            ({"token_type": [1]}, ModelFileError, "269 of them different, 1 token types"),
            ({"merges": ["ab"]}, ModelFileError, "malformed merges"),
            ({"merges": ["a zz"]}, ModelFileError, "malformed merges"),
            ({"merges": None}, ModelFileError, "merges is missing"),
            ({"eos_token_id": 999}, ModelFileError, "eos_token_id must be .* got 999"),
        ],
    )
    def test_bad_metadata(self, changes, error, message, tmp_path):
        path = write_tokenizer_gguf(tmp_path / "t.gguf", **changes)
        with pytest.raises(error, match=message) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(ModelFileError, match=r"nothing\.gguf: cannot be read"):
            load_tokenizer(tmp_path / "nothing.gguf")


def test_smollm2():
    tokenizer = load_tokenizer(smollm2.model_path())
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    for case in smollm2.golden():
        assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"]
        assert tokenizer.encode(tokenizer.decode(case["token_ids"]))  # Text, whatever it is.
    question = {"role": "user", "content": "What is continuous batching?"}
    assert tokenizer.apply_chat_template([question]) in [case["prompt"] for case in smollm2.golden()]
