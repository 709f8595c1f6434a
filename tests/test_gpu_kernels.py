"""PTX files of a whole model: the right variants, whole folders, a manifest that tells how to launch."""

import hashlib
import json

import pytest

from contbatch import gpu_kernels
from contbatch.errors import InvalidRequestError, MissingDependencyError, ModelFileError, UnsupportedModelError
from contbatch.export import export_onnx
from contbatch.model import random_model

SIZES = {"num_heads": 6, "kv_num_heads": 2, "head_size": 64, "hidden_size": 384}


def exported(folder, dtype="float16", **config):
    return export_onnx(random_model(0, **SIZES | config), folder / "model.onnx", dtype)


def test_manifest_matches_the_files(tmp_path):
    pytest.importorskip("triton", reason="PTX is made by Triton: pip install 'contbatch[ptx]' (Linux)")
    folder = gpu_kernels.export_ptx(exported(tmp_path), [80], page_size=32, num_splits=4)
    assert folder == tmp_path / "ptx"
    manifest = json.loads((folder / gpu_kernels.MANIFEST).read_text())
    entries = {entry["file"]: entry for entry in manifest["kernels"]}
    names = ["combine-sm80.ptx", "paged_attention-sm80-tactic1.ptx", "paged_attention-sm80-tactic2.ptx"]
    assert sorted(entries) == names
    assert {path.name for path in folder.iterdir()} == {*entries, gpu_kernels.MANIFEST}
    for name, entry in entries.items():
        content = (folder / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert f".entry {entry['name']}(".encode() in content
        assert (entry["target"], entry["spilled_bytes"]) == ("sm_80", 0)
    attention = entries[names[1]]
    assert (attention["block_tokens"], attention["grid_y"], attention["grid_z"]) == (5, 2, 4)
    assert (attention["variant"]["page_size"], attention["variant"]["dtype"]) == (32, "float16")
    assert manifest["tools"]["ptxas"]["80"].count(".") == 1
    old = folder / "combine-sm80.ptx"
    gpu_kernels.export_ptx(tmp_path / "model.onnx", [80])
    assert not old.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_variants_follow_the_model():
    plain = random_model(0, **SIZES).config
    special = {"rotary_dim": 32, "rotary_interleaved": True, "sliding_window": 77, "attention_softcap": 20.0}
    changed = random_model(0, qk_norm=True, **SIZES, **special).config
    first, second = (gpu_kernels.variants(config, "bfloat16", 16)[2] for config in (plain, changed))
    assert (first.rotary_dim, first.local_window_size, first.softcap, first.packed) == (64, -1, 0.0, True)
    assert (second.rotary_dim, second.local_window_size, second.softcap, second.packed) == (32, 77, 20.0, False)
    assert (first.rotary_interleaved, second.rotary_interleaved) == (False, True)
    assert second.multiplier == 1 / 8


def test_bad_requests_are_named_and_leave_nothing(tmp_path):
    path = exported(tmp_path, "float32")
    with pytest.raises(UnsupportedModelError, match="float16 or bfloat16, got dtype 'float32'"):
        gpu_kernels.export_ptx(path, [90])
    with pytest.raises(InvalidRequestError, match="got none"):
        gpu_kernels.export_ptx(path, [])
    with pytest.raises(ModelFileError, match=r"nothing\.onnx"):
        gpu_kernels.export_ptx(tmp_path / "nothing.onnx", [90])
    with pytest.raises((UnsupportedModelError, MissingDependencyError), match="got 70"):
        gpu_kernels.export_ptx(exported(tmp_path), [70])
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
