"""The one-shot check of a GPU: its dry run, and its GPU path on a fake driver that runs the executable spec."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import fake_tensorrt
import numpy as np
import pytest

from contbatch.plugins.paged_attention.reference import paged_attention

pytest.importorskip("triton", reason="kernels are made by Triton: pip install 'contbatch[ptx]' (Linux)")
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.py"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check
    import gpu_launch

    for module in (gpu_check, gpu_launch):  # the sizes of the real check take minutes here
        monkeypatch.setattr(module, "SIZES", SIZES)
    monkeypatch.setattr(gpu_launch, "COPIED", 4096)
    monkeypatch.setattr(gpu_check, "SEQUENCES", (1, 3))
    monkeypatch.setattr(gpu_check, "CONTEXTS", (40,))
    monkeypatch.setattr(gpu_check, "CASES", {"mixed": [(15, 2), (0, 5), (20, 1), (7, 0)], "decode": [(3, 1), (17, 1)]})
    return gpu_check


SIZES = {"num_heads": 6, "kv_num_heads": 2, "head_size": 64, "hidden_size": 64, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("check")


class Driver(fake_cuda.Driver):
    """Its one kernel is the op's executable spec; `wrong` may spoil what it wrote."""

    def __init__(self, wrong=None):
        super().__init__(total=1 << 28)
        self.wrong, self.launches = wrong, []
        self.Event = lambda: SimpleNamespace(record=int, synchronize=int, time_since=lambda begin: 2.0)

    def to_device(self, array):
        allocation = self.mem_alloc(array.nbytes)
        allocation.bytes[:] = array.reshape(-1).view(np.uint8)
        return allocation

    def memcpy_dtoh(self, array, source):
        array.reshape(-1).view(np.uint8)[:] = self.at(int(source), array.nbytes)

    def memcpy_dtod_async(self, target, source, num_bytes, stream=None):
        if stream:
            super().memcpy_dtod_async(target, source, num_bytes, stream)

    def module_from_buffer(self, ptx):
        def get_function(name):
            assert f".entry {name}(".encode() in ptx
            return self.launch

        return SimpleNamespace(get_function=get_function)

    def read(self, address, dtype, *shape):
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.at(int(address), num_bytes).view(dtype).reshape(shape)

    def memset_d8(self, target, value, count):
        self.at(int(target), count)[:] = value

    def launch(self, *arguments, block, grid, shared, stream):
        self.check("launch")
        if stream and stream.captured is not None:
            kernel = partial(self.launch, *arguments, block=block, grid=grid, shared=shared, stream=None)
            stream.append(kernel)
            return
        query, keys, values, cumulative, past, table, cos, sin, *sizes, output, keys_out, values_out = arguments
        assert (int(keys), int(values)) == (int(keys_out), int(values_out))
        tokens, seqs, pages, width, positions = map(int, sizes)
        heads, kv, size = SIZES["num_heads"], SIZES["kv_num_heads"], SIZES["head_size"]
        self.launches.append((block, grid, shared))
        caches = [self.read(cache, np.float16, pages, 16, kv, size) for cache in (keys, values)]
        result, *new = paged_attention(
            self.read(query, np.float16, tokens, (heads + 2 * kv) * size), None, None, *caches,
            self.read(cumulative, np.int32, seqs + 1), self.read(past, np.int32, seqs),
            self.read(table, np.int32, seqs, width), self.read(cos, np.float16, positions, size // 2),
            self.read(sin, np.float16, positions, size // 2), num_heads=heads, kv_num_heads=kv, do_rotary=1,
        )  # fmt: skip
        self.read(output, np.float16, *result.shape)[...] = result
        for cache, updated in zip(caches, new, strict=True):
            cache[...] = updated
        if self.wrong == "output":
            self.read(output, np.float16, *result.shape)[-1, -1] += 1
        if self.wrong == "guard":
            self.read(int(keys) - 2, np.float16, 1)[:] = 7


def test_dry_run_prints_a_table(folder, gpu_check, capsys):
    assert gpu_check.prepare(folder, [80, 90]) == 0
    assert gpu_check.run(folder, True, None) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("no GPU: dry run on the executable spec")
    assert [line.split()[-4:] for line in lines[begin + 1 :] if "PASS" in line] == [
        ["0.0e+00;", "guard", "pages", "untouched"]
    ] * 4
    assert [line.split() for line in lines[-4:]] == [
        [n, "SKIP", "dry", "run"] for n in ("graph", "engine", "memory", "speed")
    ]


def test_the_command_line(folder):
    help_text = subprocess.run([sys.executable, SCRIPT, "--help"], check=True, capture_output=True, text=True).stdout
    assert "NEVER RUN ON A GPU" in help_text


def test_on_a_fake_gpu(folder, gpu_check, monkeypatch, capsys):
    driver = Driver().install(monkeypatch)
    monkeypatch.setattr(sys.modules["pycuda"], "driver", driver)
    fake_tensorrt.install(monkeypatch, driver)
    monkeypatch.setenv("PATH", "")
    assert gpu_check.run(folder, False, None) == 0
    text = capsys.readouterr().out
    rows = [line.split("  ") for line in text[text.index("Fake GPU 0, SM 90") :].splitlines()[1:]]
    states = [next(part.strip() for part in row[1:] if part.strip()) for row in rows]
    engine = ["INFO", "PASS", "PASS", "PASS"]
    # cases and graph; engines with and without plugin, and in 8 bits; compute-sanitizer
    assert states[:18] == ["PASS"] * 5 + engine * 3 + ["SKIP"]
    assert len(states) == 18 + 1 + 2
    assert sorted(path.parent.name for path in folder.glob("w8a8/**/model.engine")) == ["tensorrt-sm90"]
    grids = {grid for _, grid, _ in driver.launches[:4]}
    assert len(grids) > 1


@pytest.mark.parametrize(
    ("wrong", "told"), [("output", "FAIL  largest error 1.0e+00"), ("guard", "guard pages OVERWRITTEN")]
)
def test_wrong_kernels_are_found(wrong, told, folder, gpu_check, monkeypatch, capsys):
    Driver(wrong).install(monkeypatch)
    assert gpu_check.run(folder, False, "cases") == 1
    text = capsys.readouterr().out
    assert text.count(told) == 4
    assert "PASS" not in text


def test_kernels_for_another_gpu(folder, gpu_check, monkeypatch, capsys):
    driver = Driver().install(monkeypatch)
    driver.sm = (12, 0)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "run", str(folder)])
    assert gpu_check.main() == 2
    assert "has no kernels for Fake GPU 0, SM 120" in capsys.readouterr().err
