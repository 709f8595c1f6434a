"""PTX of the GPU kernel: ptxas takes it, nothing spills, and a hidden parameter is removed only if nothing reads it."""

import re
import sys

import pytest

from contbatch.errors import KernelBuildError, MissingDependencyError, UnsupportedModelError
from contbatch.plugins.paged_attention import ptx, ptxas
from contbatch.plugins.paged_attention.variant import HEAD_SIZES, Tactic, Variant, default_tactics

WHY = "PTX is made by Triton: pip install 'contbatch[ptx]' (Linux)"
ARGUMENTS = [8, 5, 3]
"""Of a packed query without splits: inputs, scalars, outputs."""


def variant(head_size=64, tactic=1, dtype="float16", **options):
    tactic = default_tactics(head_size)[tactic] if isinstance(tactic, int) else tactic
    return Variant(dtype, 32, 8, head_size, 16, tactic, rotary_dim=head_size, **options)


def parameters(kernel):
    return re.search(rf"\.entry {kernel.name}\(([^)]*)\)", kernel.ptx)[1].split(",")


@pytest.mark.parametrize("sm", ptx.PTX_VERSIONS)
@pytest.mark.parametrize("tactic", [1, 2])
def test_every_architecture_takes_it_without_spills(sm, tactic):
    pytest.importorskip("triton", reason=WHY)
    kernel = ptx.compile_attention(variant(tactic=tactic, dtype=["bfloat16", "float16"][tactic - 1]), sm)
    used = ptxas.assemble(kernel.ptx)
    assert used.target.rstrip("a") == f"sm_{sm}"
    assert 0 < used.registers <= ptx.MAX_REGISTERS
    assert used.spilled_bytes == 0
    assert kernel.shared_memory <= ptx.MAX_SHARED_MEMORY
    assert kernel.num_threads == 32 * default_tactics(64)[tactic].num_warps
    assert len(parameters(kernel)) == sum(ARGUMENTS)
    assert float(re.search(r"\.version (\S+)", kernel.ptx)[1]) * 10 == ptx.PTX_VERSIONS[sm]


@pytest.mark.parametrize(
    ("made", "sm"),
    [
        (variant(80, 1), 80),
        (variant(96, 2, softcap=30.0, local_window_size=100), 120),
        (variant(128, 2, rotary_interleaved=True), 90),
        (variant(256, 1, "bfloat16", softcap=50.0, local_window_size=4096), 86),
        (variant(256, 2), 100),
    ],
    ids=str,
)
def test_every_head_size_fits(made, sm):
    pytest.importorskip("triton", reason=WHY)
    kernel = ptx.compile_attention(made, sm)
    assert ptxas.assemble(kernel.ptx).spilled_bytes == 0
    assert kernel.shared_memory <= ptx.MAX_SHARED_MEMORY


def test_split_form_unpacked_and_combine():
    pytest.importorskip("triton", reason=WHY)
    split = ptx.compile_attention(variant(num_splits=8, packed=False), 90)
    assert len(parameters(split)) == 10 + 5 + 4
    combine = ptx.compile_combine("bfloat16", 96, 8, 90)
    assert len(parameters(combine)) == 4
    assert [ptxas.assemble(kernel.ptx).spilled_bytes for kernel in (split, combine)] == [0, 0]


def test_ptx_names_nothing_of_this_machine_and_is_the_same_again():
    triton = pytest.importorskip("triton", reason=WHY)
    kernel = ptx.compile_attention(variant(), 80)
    assert ".file" not in kernel.ptx
    assert "triton_kernel" not in kernel.ptx
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        assert ptx.compile_attention(variant(), 80) == kernel


def test_too_much_shared_memory_is_named():
    pytest.importorskip("triton", reason=WHY)
    with pytest.raises(KernelBuildError, match=r"needs \d+ bytes of shared memory on SM 80, a plain launch has 49152"):
        ptx.compile_attention(variant(128, Tactic(16, 64, 4, 3)), 80)


def test_unknown_architecture_and_missing_triton(monkeypatch):
    with pytest.raises(UnsupportedModelError, match="SM 80, 86, 89, 90, 100, 120, got 75"):
        ptx.compile_attention(variant(), 75)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'contbatch\[ptx\]'"):
        ptx.compile_combine("float16", 64, 2, 90)


def test_assembler_speaks_through_the_error():
    pytest.importorskip("triton", reason=WHY)
    with pytest.raises(KernelBuildError, match="names no target"):
        ptxas.assemble(".version 8.0")
    with pytest.raises(KernelBuildError, match=r"refuses the PTX for sm_80: (?s:.)*error"):
        ptxas.assemble(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { wrong; }")


HAND_WRITTEN = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry f(
	.param .u64 .ptr .global .align 1 f_param_0,
	.param .u32 f_param_1,
	.param .u64 .ptr .global .align 1 f_param_2
)
.reqntid 32
{{
	.reg .b32 %r<3>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [f_param_0];
	ld.param.u32 %r1, [f_param_1];
	{extra}
	st.global.u32 [%rd1], %r1;
	ret;
}}
"""


def test_unread_parameter_is_removed():
    stripped = ptx.strip_hidden_parameters(HAND_WRITTEN.format(extra=""), "f", 2)
    assert "f_param_2" not in stripped
    assert re.findall(r"\.param \.\w+ .*(f_param_\d)", stripped) == ["f_param_0", "f_param_1"]
    assert stripped.partition(".reqntid")[2] == HAND_WRITTEN.format(extra="").partition(".reqntid")[2]
    pytest.importorskip("triton", reason=WHY)
    assert ptxas.assemble(stripped).spilled_bytes == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("ld.param.u64 %rd2, [f_param_2];", "reads f_param_2, a hidden parameter"),
        ("@%p1 ld.param.b64 \t%rd2, [ f_param_2 ] ;", "reads f_param_2, a hidden parameter"),
        ("mov.b64 %rd2, f_param_2;", "uses its parameter f_param_2 other than by a plain load"),
        ("ld.param.u32 %r2, [f_param_2+4];", "uses its parameter f_param_2 other than by a plain load"),
        # Parameters lie side by side: from the address of one that is passed, a hidden one can be reached.
        ("ld.param.u64 %rd2, [f_param_1+8];", "uses its parameter f_param_1 other than by a plain load"),
        ("mov.b64 %rd2, f_param_0;", "uses its parameter f_param_0 other than by a plain load"),
    ],
)
def test_read_parameter_is_refused(extra, message):
    with pytest.raises(KernelBuildError, match=message):
        ptx.strip_hidden_parameters(HAND_WRITTEN.format(extra=extra), "f", 2)


def test_longer_names_are_not_taken_for_shorter_ones():
    text = HAND_WRITTEN.format(extra="mov.u32 %r2, f_param_20;")
    assert "f_param_20" in ptx.strip_hidden_parameters(text, "f", 2)


def test_wrong_kernel_is_named():
    text = HAND_WRITTEN.format(extra="")
    with pytest.raises(KernelBuildError, match="no kernel 'g'"):
        ptx.strip_hidden_parameters(text, "g", 2)
    with pytest.raises(KernelBuildError, match="has 3 parameters, expected at least 4"):
        ptx.strip_hidden_parameters(text, "f", 4)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size_has_two_tactics(head_size):
    assert len(default_tactics(head_size)) >= 2
