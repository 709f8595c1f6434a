"""Weights that stay in the bits of their file: the same values, the same logits, a smaller graph."""

from dataclasses import replace

import gguf
import numpy as np
import onnx
import pytest
from dense_model import dense_logits
from gguf_writer import gguf_metadata, gguf_tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from ragged import prompts_for, run_steps

from contbatch.export import export_onnx
from contbatch.model import load_model, random_model
from contbatch.packed_weight import PackedWeight, from_blocks, stacked
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
STEPS = [[(0, 5)], [(0, 20), (1, 7)], [(1, 1), (2, 1), (0, 9)], [(2, 70), (0, 1)]]


@pytest.mark.parametrize("kind", BLOCK_BYTES)
@given(data=st.data())
def test_values_are_those_of_the_gguf_package(kind, data):
    """Any bytes with finite scales, zero and negative ones too. (q + m / d) · d differs from q · d + m by rounding."""
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    blocks = data.draw(arrays(np.uint8, (rows * columns, BLOCK_BYTES[kind])))
    head = 4 if kind == "Q4_1" else 2
    halves = st.one_of(st.just(0.0), st.floats(-8, 8, width=16))
    blocks[:, :head] = data.draw(arrays(np.float16, (rows * columns, head // 2), elements=halves)).view(np.uint8)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(rows, columns * 32)
    packed = from_blocks(kind, blocks, rows)
    assert packed.shape == expected.shape
    assert packed.bits == (8 if kind == "Q8_0" else 4)
    assert packed.codes.max() < 16 or packed.bits == 8
    scale = np.abs(expected).reshape(rows, columns, 32).max(-1).repeat(32, axis=1)
    spread = np.abs(packed.scales[:, :, 0]).repeat(32, axis=1) * 16
    assert (np.abs(packed.dense() - expected) <= 2**-22 * (scale + spread)).all()
    order = data.draw(st.permutations(range(rows)))
    np.testing.assert_array_equal(packed.take(np.array(order)).dense(), packed.dense()[order])


def test_other_kinds_are_left_to_be_widened():
    assert from_blocks("Q6_K", np.zeros((2, 210), np.uint8), 1) is None


def test_only_weights_of_a_kind_are_stacked():
    four, eight = (from_blocks(kind, np.zeros((2, BLOCK_BYTES[kind]), np.uint8), 2) for kind in ("Q4_0", "Q8_0"))
    wide = from_blocks("Q8_0", np.zeros((4, 34), np.uint8), 2)
    assert stacked([eight, eight]).shape == (4, 32)
    assert stacked([four, four, four]).shape == (6, 32)
    assert stacked([four, eight]) is stacked([eight, wide]) is None
    assert stacked([four, PackedWeight(four.codes, four.scales, None)]) is None


def quantised(folder, kinds, **changes):
    """A loaded model; `kinds` gives the type of a weight by the last part of its name, "" that of the others."""
    model = random_model(3, architecture="llama", **{"intermediate_size": 96, **changes})
    names = gguf_tensors(model).items()
    short = {
        name: next((kind for part, kind in kinds.items() if part and f"{part}." in name), kinds[""])
        for name, array in names
        if array.ndim == 2
    }
    types = {name: gguf.GGMLQuantizationType[kind] for name, kind in short.items()}
    path = write_gguf(folder / "m.gguf", "llama", gguf_metadata(model.config), gguf_tensors(model), types)
    return load_model(path)


MIXES = {
    "like SmolLM2": ({"": "Q4_1", "token_embd": "Q8_0"}, {"tie_word_embeddings": True}, {"UINT4", "INT8"}),
    "tied in 4 bits": ({"": "Q4_1"}, {"tie_word_embeddings": True}, {"UINT4", "UINT8"}),
    "untied": ({"": "Q8_0", "output": "Q4_0", "token_embd": "Q4_1"}, {}, {"UINT4", "INT8"}),
    "q not like k": ({"": "Q4_0", "attn_k": "Q8_0"}, {"attention_bias": True}, {"UINT4"}),
    "nothing packed": ({"": "F16"}, {}, set()),
}


@pytest.mark.parametrize("mix", MIXES)
def test_logits_equal_those_of_widened_weights(mix, tmp_path):
    kinds, changes, types = MIXES[mix]
    model = quantised(tmp_path, kinds, **changes)
    path = export_onnx(model, tmp_path / "m.onnx")
    onnx.checker.check_model(path)
    small = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(path).graph.initializer}
    assert small & {"UINT4", "UINT8", "INT8"} == types
    sequences = prompts_for(STEPS, 256)
    expected = np.concatenate([dense_logits(model, ids) for ids in sequences])
    for runner in (ReferenceModel(path, 48, 3), CPUModel(path, 40, 16)):
        found = np.concatenate(run_steps(runner, sequences, STEPS))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    bf16 = np.concatenate(run_steps(CPUModel(path, 40, 16, precision="bf16"), sequences, STEPS))
    assert 1e-3 < np.sqrt(((bf16 - expected) ** 2).mean()) < 0.15


def test_small_dtypes_are_widened(tmp_path):
    path = export_onnx(quantised(tmp_path, {"": "Q4_1"}), tmp_path / "m.onnx", "float16")
    kinds = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert not kinds & {onnx.TensorProto.UINT4, onnx.TensorProto.INT8}


def test_a_packed_file_is_small(tmp_path):
    """6.5 to 8.5 bits a weight, its scales and zeros in float32 included, in place of 32."""
    changes = {"hidden_size": 512, "intermediate_size": 512, "tie_word_embeddings": True}
    model = quantised(tmp_path, {"": "Q4_1", "token_embd": "Q8_0"}, **changes)
    sizes = [
        export_onnx(each, tmp_path / f"{i}.onnx", max_position=1).with_suffix(".onnx.data").stat().st_size
        for i, each in enumerate((model, replace(model, packed={})))
    ]
    assert sizes[0] < 0.3 * sizes[1]
