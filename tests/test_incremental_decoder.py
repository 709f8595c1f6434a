import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TOKENS, byte_level, sentencepiece

from contbatch.errors import InvalidRequestError
from contbatch.tokenizer import IncrementalDecoder, Tokenizer

BYTES, PIECES = Tokenizer(byte_level(), "bytes"), Tokenizer(sentencepiece(), "pieces")
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
# Few characters, so that stop strings do occur, of one to four bytes each.
LETTERS = st.sampled_from("ab é😀<")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


def run(tokenizer, token_ids, stop=(), min_tokens=0):
    """Push everything; returns the decoder and the texts released by each push and by the flush."""
    decoder = IncrementalDecoder(tokenizer, stop, min_tokens)
    released = []
    for token in token_ids:
        released.append(decoder.push(token))
        assert decoder.text == "".join(released)
    released.append(decoder.flush())
    assert decoder.text == "".join(released)
    return decoder, released


def oracle(text, stop, exempt=0):
    """Find the stop string that starts first, the shortest of those, of all that end beyond `exempt` characters."""
    starts = [(start, string) for start in range(len(text)) for string in stop if text.startswith(string, start)]
    found = [(start, len(string), string) for start, string in starts if start + len(string) > exempt]
    start, _, string = min(found, default=(len(text), 0, None))
    return text[:start], string


@TOKENIZERS
@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_decode_as_a_whole(tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    decoder, _ = run(tokenizer, token_ids)
    assert decoder.text == tokenizer.decode(token_ids)
    assert decoder.stopped is None


@TOKENIZERS
@settings(deadline=None)
@given(text=st.text(LETTERS | st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_whole_characters_at_once_and_never_a_replacement(tokenizer, text):
    token_ids = tokenizer.encode(text)
    decoder, data = IncrementalDecoder(tokenizer), b""
    for token in token_ids:
        assert "\ufffd" not in decoder.push(token)
        data += tokenizer.token_bytes[token]
        assert decoder.text == data.decode("utf-8", "ignore").removeprefix(tokenizer.token_bytes.leading_space)
    assert decoder.flush() == ""
    assert decoder.text == text


@TOKENIZERS
@settings(deadline=None, max_examples=300)
@given(text=st.text(LETTERS, max_size=14), stop=STOPS, tail=st.lists(st.integers(3, 250), max_size=2))
def test_stop_strings_as_found_in_the_whole_text(tokenizer, text, stop, tail):
    token_ids = tokenizer.encode(text) + tail
    decoder, released = run(tokenizer, token_ids, stop)
    assert (decoder.text, decoder.stopped) == oracle(tokenizer.decode(token_ids), stop)
    so_far = ""
    for i, delta in enumerate(released[:-1]):
        so_far += delta
        complete = b"".join(tokenizer.token_bytes[token] for token in token_ids[: i + 1]).decode("utf-8", "ignore")
        held = complete.removeprefix(tokenizer.token_bytes.leading_space)[len(so_far) :]
        # Nothing is held back without need: it begins a stop string, or the answer has stopped.
        begins = any(string.startswith(held[: len(string)]) for string in stop)
        assert held == "" or begins or decoder.stopped is not None


@TOKENIZERS
@settings(deadline=None, max_examples=200)
@given(text=st.text(LETTERS, max_size=14), stop=STOPS, tail=st.lists(st.integers(3, 250), max_size=2), data=st.data())
def test_stop_strings_within_the_first_tokens_do_not_count(tokenizer, text, stop, tail, data):
    token_ids = tokenizer.encode(text) + tail
    min_tokens = data.draw(st.integers(0, len(token_ids) + 1))
    first = IncrementalDecoder(tokenizer)
    for token in token_ids[:min_tokens]:
        first.push(token)
    whole = tokenizer.decode(token_ids)
    exempt = len(first.text) if min_tokens <= len(token_ids) else len(whole)
    decoder, _ = run(tokenizer, token_ids, stop, min_tokens)
    assert (decoder.text, decoder.stopped) == oracle(whole, stop, exempt)


def tokens(*names):
    return [TOKENS.index(name) for name in names]


def test_a_character_of_several_tokens():
    """😀 is F0 9F 98 80: "ð" "Ł" "ĺ" "Ģ" in the byte-level alphabet."""
    _, released = run(BYTES, tokens("a", "ðŁ", "ĺ", "Ģb"))
    assert released == ["a", "", "", "😀b", ""]
    _, released = run(BYTES, tokens("að", "Ł", "ĺ", "Ģ"))
    assert released == ["a", "", "", "😀", ""]


def test_bytes_that_are_no_character():
    _, released = run(BYTES, tokens("ðŁ", "a", "ĺ", "ð", "Ł"))
    assert released == ["", "\ufffda", "\ufffd", "", "", "\ufffd"]


def test_a_stop_string_over_two_tokens_after_an_emoji():
    decoder, released = run(BYTES, tokens("ðŁ", "ĺ", "Ģ", "a", "b", "c"), ["ab"])
    assert released == ["", "", "😀", "", "", "", ""]
    assert decoder.stopped == "ab"


def test_a_stop_string_inside_one_token():
    decoder, released = run(BYTES, tokens("Ġthe", "x"), ["h"])
    assert released == [" t", "", ""]
    assert decoder.stopped == "h"


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text_left", "stopped"),
    [
        ("ab", 2, "x", "ab"),
        ("ab", 3, "xab", "ab"),
        ("ab", 4, "xab", "ab"),
        ("ab", 5, "xababc", None),
        ("bc", 5, "xaba", "bc"),
    ],
)
def test_a_stop_string_may_begin_but_not_end_within_the_first_tokens(stop, min_tokens, text_left, stopped):
    decoder, _ = run(BYTES, tokens(*"xababc"), [stop], min_tokens)
    assert (decoder.text, decoder.stopped) == (text_left, stopped)


def test_what_only_looked_like_a_stop_string_is_released():
    decoder, released = run(BYTES, tokens("a", "a", "b", "c", "a"), ["aac", "abd"])
    assert released == ["", "", "a", "abc", "", "a"]
    assert decoder.stopped is None


@pytest.mark.parametrize(
    ("text", "text_left", "stopped"),
    [("abcd", "", "abcd"), ("abcx", "a", "bc"), ("abc", "a", "bc"), ("xbcd", "x", "bc")],
)
def test_the_earliest_start_wins_even_if_complete_later(text, text_left, stopped):
    decoder, _ = run(BYTES, tokens(*text), ["bc", "abcd"])
    assert (decoder.text, decoder.stopped) == (text_left, stopped)


def test_of_the_same_start_the_first_complete_wins_at_once():
    decoder = IncrementalDecoder(BYTES, ["abc", "ab"])
    assert [decoder.push(token) for token in tokens("a", "b")] == ["", ""]
    assert decoder.stopped == "ab"
    decoder, _ = run(BYTES, tokens("Ġthe"), ["the", "th"])
    assert (decoder.text, decoder.stopped) == (" ", "th")


def test_the_leading_space_of_sentencepiece_goes_once():
    special, first = 1, PIECES.encode("ab")
    _, released = run(PIECES, [special, *first, special, *first])
    assert released == ["", "ab", "", " ab", ""]


def test_after_the_end():
    decoder = IncrementalDecoder(BYTES, "b")
    assert decoder.push(*tokens("b")) == decoder.push(*tokens("a")) == decoder.flush() == decoder.text == ""
    ended = IncrementalDecoder(BYTES)
    assert ended.flush() == ended.flush() == ""
    with pytest.raises(InvalidRequestError, match=r"token 5 came after flush\(\)"):
        ended.push(5)


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None]])
def test_bad_stop_strings(stop):
    with pytest.raises(InvalidRequestError, match="stop must be non-empty strings"):
        IncrementalDecoder(BYTES, stop)


def test_the_cost_of_a_token_does_not_grow():
    decoder, word = IncrementalDecoder(BYTES, ["the end"]), tokens("Ġthe")[0]

    def seconds(pushes):
        start = time.perf_counter()
        for _ in range(pushes):
            decoder.push(word)
        return time.perf_counter() - start

    first = min(seconds(500) for _ in range(5))
    seconds(20_000)
    assert min(seconds(500) for _ in range(5)) < 5 * first
