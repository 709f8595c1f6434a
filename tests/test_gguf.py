import re
import struct
import warnings

import gguf
import numpy as np
import pytest
from dense_model import dense_logits
from gguf_writer import gguf_metadata, gguf_tensors, write_gguf, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contbatch.errors import ContbatchError, ModelFileError, UnsupportedModelError
from contbatch.gguf_file import GGUFFile
from contbatch.model import Model, load_model, random_model

IDS = np.random.default_rng(5).integers(0, 256, 12)
ARCHITECTURES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "head_size": 32},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_round_trip(kind, tmp_path):
    architecture = kind.split("-")[0]
    wanted = random_model(7, architecture=architecture, rope_theta=5e4, **ARCHITECTURES[kind])
    loaded = load_model(write_model(tmp_path / "m.gguf", wanted, architecture))
    assert (
        loaded.config
        == random_model(
            architecture=architecture, rope_theta=5e4, rms_norm_eps=float(np.float32(1e-5)), **ARCHITECTURES[kind]
        ).config
    )
    for name, array in wanted.weights.items():
        np.testing.assert_array_equal(loaded.weights[name], array, err_msg=name)
        assert loaded.weights[name].flags.writeable


@pytest.mark.parametrize("rotary_dim", [0, 8])
def test_llama_rows_mean_what_llama_cpp_rotates(rotary_dim, tmp_path):
    """The rows as stored, rotated in neighbouring pairs as llama.cpp does, give the logits of what is loaded."""
    stored = random_model(7, architecture="llama", rotary_interleaved=True, rotary_dim=rotary_dim)
    # gguf_tensors would permute: these weights are in the file's order already.
    tensors = gguf_tensors(Model(stored.config, stored.weights, ""), "qwen2")
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(stored.config), tensors)
    loaded = load_model(path)
    assert not loaded.config.rotary_interleaved
    assert loaded.config.rotary_dim == rotary_dim
    np.testing.assert_allclose(dense_logits(loaded, IDS), dense_logits(stored, IDS), atol=1e-4)


def _quantizable():
    for kind in gguf.GGMLQuantizationType:
        try:
            packed = gguf.quantize(np.ones((1, 256), np.float32), kind)
            gguf.dequantize(packed, kind)
        except NotImplementedError:
            continue
        yield kind


@pytest.mark.parametrize("kind", list(_quantizable()), ids=lambda kind: kind.name)
def test_quantised_tensors(kind, tmp_path):
    model = random_model(2, architecture="llama", hidden_size=256, intermediate_size=512, num_heads=16)
    types = {name: kind for name, array in gguf_tensors(model).items() if array.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model.config), gguf_tensors(model), types)
    file = GGUFFile(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert file.tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        values = file.tensor(name)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, gguf.dequantize(tensor.data, tensor.tensor_type), err_msg=name)
    load_model(path)


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    general = {"a.text": "héllo", "a.list": ["x", "", "ÿ"], "a.numbers": [1, -2, 3], "a.flag": True, "a.real": 0.5}
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"t": np.ones(3, np.float32)}, general=general)
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in key}
    assert GGUFFile(path).metadata == theirs
    assert theirs.items() >= general.items()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_count": 3}, ModelFileError, r"lacks the tensor blk\.2\.\S+ and 8 more"),
        ({"block_count": 1}, ModelFileError, r"tensor that llama doesn't use: blk\.1\.\S+ and 8 more"),
        ({"block_count": None}, ModelFileError, r"llama\.block_count must be an integer ≥ 1, got None"),
        ({"block_count": 2**32 - 1}, ModelFileError, "num_layers must be at most 10000"),
        ({"block_count": "2"}, ModelFileError, "got '2'"),
        ({"embedding_length": 32}, ModelFileError, r"token_embd\.weight must be \(256, 32\).* is \(256, 64\)"),
        ({"attention__head_count": 3}, ModelFileError, "num_heads must be a multiple"),
        ({"attention__head_count": [4, 4]}, ModelFileError, r"attention\.head_count must be"),
        ({"attention__key_length": 24}, UnsupportedModelError, "different size"),
        ({"attention__layer_norm_rms_epsilon": None}, ModelFileError, "rms_norm_eps"),
        ({"rope__dimension_count": 7}, ModelFileError, "rotated dimensions must be even, got 7"),
        ({"rope__scaling__type": "yarn"}, UnsupportedModelError, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"rope__scaling__factor": 2.0}, UnsupportedModelError, r"rope\.scaling\.factor = 2\.0"),
        ({"expert_count": 8}, UnsupportedModelError, "expert_count = 8"),
        ({"attention__causal": False}, UnsupportedModelError, "causal"),
    ],
)
def test_bad_metadata(changes, error, message, tmp_path):
    path = write_model(tmp_path / "m.gguf", random_model(architecture="llama"), **changes)
    with pytest.raises(error, match=message) as caught:
        load_model(path)
    assert str(caught.value).count(str(path)) == 1


def test_harmless_metadata(tmp_path):
    changes = {"rope__scaling__type": "none", "expert_count": 0, "attention__sliding_window": 5, "vocab_size": 256}
    path = write_model(tmp_path / "m.gguf", random_model(architecture="llama"), attention__head_count_kv=2, **changes)
    assert load_model(path).config.sliding_window == 5


@pytest.mark.parametrize(
    ("name", "array", "error", "message"),
    [
        ("token_embd.weight", None, ModelFileError, r"lacks the tensor token_embd\.weight"),
        ("blk.1.ffn_up.weight", None, ModelFileError, r"lacks the tensor blk\.1\.ffn_up\.weight$"),
        ("blk.0.attn_q.weight", np.ones((60, 64)), ModelFileError, "60 query or key rows are no whole heads of 16"),
        ("blk.0.attn_v.weight", np.ones((64, 32)), ModelFileError, r"must be \(32, 64\) .* is \(64, 32\)"),
        ("output_norm.weight", np.full(64, np.nan), ModelFileError, r"output_norm\.weight holds NaN"),
        ("output_norm.weight", np.r_[np.ones(63), np.inf], ModelFileError, r"output_norm\.weight holds NaN or inf"),
        ("rope_freqs.weight", np.ones(8), UnsupportedModelError, r"rope_freqs\.weight"),
        ("blk.0.attn_output.bias", np.ones(64), UnsupportedModelError, r"attn_output\.bias"),
        ("blk.0.ffn_gate.bias", np.ones(128), ModelFileError, r"doesn't use: blk\.0\.ffn_gate\.bias$"),
    ],
)
def test_bad_tensors(name, array, error, message, tmp_path):
    model = random_model(architecture="llama")
    tensors = gguf_tensors(model) | {name: None if array is None else array.astype(np.float32)}
    tensors = {key: value for key, value in tensors.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model.config), tensors)
    with pytest.raises(error, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_other_architectures(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {"t": np.ones(3, np.float32)})
    with pytest.raises(UnsupportedModelError, match="'mamba'; known in GGUF files: llama, qwen2, qwen3"):
        load_model(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a small valid file, and where its tensor data begins."""
    model = random_model(
        architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, head_size=2
    )
    path = write_model(tmp_path_factory.mktemp("whole") / "m.gguf", model)
    data = path.read_bytes()
    return data, min(info.offset for info in GGUFFile(path).tensors.values())


def _load_bytes(folder, data):
    path = folder / "m.gguf"
    path.write_bytes(data)
    return load_model(path)


def test_every_truncation(whole, tmp_path):
    data, start = whole
    for length in [*range(0, start, 2), *range(start, len(data), 61), len(data) - 1]:
        with pytest.raises(ModelFileError, match=re.escape(str(tmp_path / "m.gguf"))):
            _load_bytes(tmp_path, data[:length])
    _load_bytes(tmp_path, data)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_corruption_raises_typed_errors_only(whole, tmp_path, draw):
    data, start = bytearray(whole[0]), whole[1]
    for _ in range(draw.draw(st.integers(1, 3))):
        place = draw.draw(st.integers(0, start + 40))
        data[place : place + 8] = draw.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = str(tmp_path)
        try:
            _load_bytes(tmp_path, bytes(data))
        except ContbatchError as error:
            message = str(error)
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("offset", "replacement", "error", "message"),
    [
        (0, b"PK\x03\x04", ModelFileError, r"not a GGUF file: it starts with b'PK\\x03\\x04'"),
        (4, struct.pack("<I", 1), UnsupportedModelError, "GGUF version 1;"),
        (4, struct.pack(">I", 3), UnsupportedModelError, "big-endian"),
        (8, struct.pack("<Q", 2**60), ModelFileError, "malformed"),
        (16, struct.pack("<Q", 2**60), ModelFileError, "malformed"),
        (24, struct.pack("<Q", 2**63), ModelFileError, "truncated or malformed"),
    ],
)
def test_bad_headers(whole, tmp_path, offset, replacement, error, message):
    data = bytearray(whole[0])
    data[offset : offset + len(replacement)] = replacement
    with pytest.raises(error, match=message):
        _load_bytes(tmp_path, bytes(data))


def test_repeated_names(whole, tmp_path):
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.attn_k\.weight appears twice"):
        _load_bytes(tmp_path, whole[0].replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(ModelFileError, match=r"key llama\.attention\.key_length appears twice"):
        _load_bytes(tmp_path, whole[0].replace(b"attention.head_count\x04", b"attention.key_length\x04"))
