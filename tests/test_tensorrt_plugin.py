"""The plugins through TensorRT's real Python bindings, on stub libraries: no TensorRT and no GPU has run them."""

import importlib.util
import re
import shutil

import pytest
import stubbed_tensorrt

from contbatch.errors import KernelBuildError, UnsupportedModelError
from contbatch.plugins.paged_attention import ptxas
from contbatch.plugins.paged_attention.variant import default_tactics

pytest.importorskip("triton", reason="kernels are made by Triton: pip install 'contbatch[ptx]' (Linux)")
if not importlib.util.find_spec("tensorrt_bindings"):
    pytest.skip("TensorRT's bindings are missing: pip install 'contbatch[ptx]'", allow_module_level=True)
if not shutil.which("cc"):
    pytest.skip("the stub libraries need a C compiler", allow_module_level=True)

SM = 90
SYMBOLS = {"tokens": 37, "pages": 100, "seqs": 5, "seqs+1": 6, "width": 9}
ATTRIBUTES = {  # in another order than the plugin's
    "rotary_interleaved": 0,
    "softcap": 0.0,
    "scale": 0.25,
    "num_heads": 9,
    "do_rotary": 1,
    "kv_num_heads": 3,
    "local_window_size": -1,
}


def inputs(dtype="float16", head_size=64, page_size=16, heads=15):
    cache, table = ("pages", page_size, 3, head_size), (2048, 32)
    shapes = [("tokens", heads * 64), cache, cache, ("seqs+1",), ("seqs",), ("seqs", "width"), table, table]
    return [(shape, "int32" if 3 <= i <= 5 else dtype) for i, shape in enumerate(shapes)]


def build(op="PagedAttention", attributes=ATTRIBUTES, tensors=None, **symbols):
    arguments = SM, op, attributes, tensors or inputs(), SYMBOLS | symbols
    return stubbed_tensorrt.submit(stubbed_tensorrt.build, *arguments)


def num_parameters(kernel):
    name, ptx = kernel
    return len(re.search(rf"\.entry {name}\(([^)]*)\)", ptx.decode())[1].split(","))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention(dtype):
    built = build(tensors=inputs(dtype))
    kind = {"float16": "HALF", "bfloat16": "BF16"}[dtype]
    cache = (100, 16, 3, 64)
    assert built["shapes"] == [(37, 576), cache, cache]
    assert built["types"] == [kind] * 3
    assert built["aliases"] == [-1, 1, 2]
    assert built["formats"] == [(t, "LINEAR") for t in [kind] * 3 + ["INT32"] * 3 + [kind] * 5]
    assert set(built["tactics"]) == {1, 2}
    for number, made in built["tactics"].items():
        tactic = default_tactics(64)[number]
        tokens = tactic.block_rows // 3  # of a program: three query heads share a KV head
        shared = made["launch"].pop("shared_mem")
        block = {"block_x": 32 * tactic.num_warps, "block_y": 1, "block_z": 1}
        assert made["launch"] == {"grid_x": 37 // tokens + 5 + 1, "grid_y": 3, "grid_z": 1, **block}
        assert 0 < shared <= 49_152
        assert made["scalars"] == [37, 5, 100, 9, 2048]
        assert num_parameters(made["kernel"]) == 8 + 5 + 3
        assert ptxas.assemble(made["kernel"][1].decode()).target == "sm_90a"
    kernels = [made["kernel"] for made in built["tactics"].values()]
    assert kernels[0] != kernels[1]


def test_grid_follows_the_shapes():
    launches = [build(tokens=n)["tactics"][1]["launch"]["grid_x"] for n in (1, 5, 500)]
    assert launches == [0 + 6, 1 + 6, 100 + 6]  # 16 rows hold 5 tokens of three heads


def test_attributes_reach_the_kernel_by_name_not_by_place_in_the_node():
    plain = build()["tactics"][1]["kernel"]
    assert build(attributes=dict(sorted(ATTRIBUTES.items())))["tactics"][1]["kernel"] == plain
    changes = {"scale": 0.5, "softcap": 30.0, "local_window_size": 64, "rotary_interleaved": 1}
    others = [build(attributes=ATTRIBUTES | {name: value})["tactics"][1]["kernel"] for name, value in changes.items()]
    assert len({plain, *others}) == 5


def test_split_and_combine():
    built = build("PagedAttentionSplit", {"num_splits": 4, **ATTRIBUTES})
    cache = (100, 16, 3, 64)
    assert built["shapes"] == [(4, 37, 9, 64), (4, 37, 9), cache, cache]
    assert built["types"] == ["FLOAT", "FLOAT", "HALF", "HALF"]
    assert built["aliases"] == [-1, -1, 1, 2]
    assert built["tactics"][1]["launch"]["grid_z"] == 4
    assert num_parameters(built["tactics"][2]["kernel"]) == 8 + 5 + 4
    partial = [((4, "tokens", 9, 64), "float32"), ((4, "tokens", 9), "float32")]
    combined = build("PagedAttentionCombine", {"to": 16}, partial)
    assert combined["shapes"] == [(37, 576)]
    assert combined["types"] == ["BF16"]
    assert combined["formats"] == [("FLOAT", "LINEAR")] * 2 + [("BF16", "LINEAR")]
    [made] = combined["tactics"].values()
    assert made["launch"]["grid_x"] == 37 * 9
    assert made["scalars"] == [37 * 9]
    assert num_parameters(made["kernel"]) == 2 + 1 + 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensors": inputs("float32")}, "takes float16 or bfloat16, got DataType.FLOAT"),
        ({"tensors": inputs(page_size="page")}, "dimension 1 of key_cache must be known when the engine is built"),
        ({"tensors": inputs(head_size=72)}, r"head sizes \(64, 80, 96, 128, 256\), got 72"),
        ({"attributes": ATTRIBUTES | {"do_rotary": 0}}, "without do_rotary = 1"),
        ({"op": "PagedAttentionCombine", "attributes": {"to": 1}}, r"must be one of \[10, 16\], got 1"),
    ],
)
def test_what_is_refused(changed, message):
    if changed.get("op"):
        changed = {**changed, "tensors": [((2, "tokens", 9, 64), "float32"), ((2, "tokens", 9), "float32")]}
    with pytest.raises(UnsupportedModelError, match=message):
        build(**changed, page=16)


def test_missing_attribute_is_named():
    attributes = {name: value for name, value in ATTRIBUTES.items() if name != "softcap"}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'softcap'"):
        build(attributes=attributes)


def declared_names():
    import tensorrt as trt

    creator = trt.get_plugin_registry().get_creator("PagedAttention", "1", "contbatch")
    return [field.name for field in creator.field_names]


def test_creator_lists_the_attributes_in_the_order_of_the_contract():
    build()
    names = ["num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"]
    assert stubbed_tensorrt.submit(declared_names) == names


def register_again(sm):
    from contbatch.plugins.paged_attention import tensorrt_plugin

    tensorrt_plugin.register(sm)


def test_one_process_builds_for_one_architecture():
    build()
    stubbed_tensorrt.submit(register_again, SM)
    with pytest.raises(KernelBuildError, match="registered for SM 90, a process builds for one; got 80"):
        stubbed_tensorrt.submit(register_again, 80)
