"""The figures of devices, against those of their makers' data sheets written down a second time."""

import pytest

from contbatch.hardware import HARDWARE
from contbatch.roofline import Roofline

# fmt: off
# TFLOP/s, dense: f16 and bf16, 8-bit floats, 8-bit integers, f32; GB/s and GiB of memory; GB/s to a peer, to the host.
FIGURES = {
    "A100-40GB": (312, None, 624, 19.5, 1555, 40, 300, 32),
    "A100-80GB": (312, None, 624, 19.5, 2039, 80, 300, 32),
    "H100": (989.4, 1978.9, 1978.9, 66.9, 3350, 80, 450, 64),
    "H200": (989.4, 1978.9, 1978.9, 66.9, 4800, 141, 450, 64),
    "B200": (2250, 4500, 4500, 75, 8000, 180, 900, 64),
    "L4": (121, 242.5, 242.5, 30.3, 300, 22.494, 32, 32),
    "L40S": (362, 733, 733, 91.6, 864, 44.988, 32, 32),
    "RTX-3090": (71, None, 284, 35.6, 936, 24, 32, 32),
    "RTX-4090": (165.2, 330.3, 660.6, 82.6, 1008, 24, 32, 32),
    "RTX-5090": (209.5, 419, 838, 104.8, 1792, 32, 64, 64),
    "T4": (65, None, 130, 8.1, 320, 15, 16, 16),
    "laptop-cpu": (None, None, None, 0.768, 89.6, 16, 32, 89.6),
}
# MiB in total, as nvidia-smi shows them: the first six in pull request 2797 of modal-labs/modal-client, the GeForce in
# issues (noonghunna/club-3090 390 and 1229, RLinf/RLinf 255), H200 and B200 in several public repositories.
SHOWN = {
    "A100-40GB": 40960, "A100-80GB": 81920, "H100": 81559, "L40S": 46068, "L4": 23034, "T4": 15360,
    "H200": 143771, "B200": 183359, "RTX-3090": 24576, "RTX-4090": 24564, "RTX-5090": 32607,
}
# fmt: on


def test_every_device_is_in_the_table():
    assert FIGURES.keys() == HARDWARE.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_the_data_sheets(name):
    half, f8, int8, f32, gb_per_s, gib, peer, host = FIGURES[name]
    gpu = HARDWARE[name]
    wide = {} if name == "T4" else {"bf16": half}  # Turing has none
    expected = {"f16": half, **wide, "f8": f8, "int8": int8, "f32": f32}
    expected = {dtype: tflops for dtype, tflops in expected.items() if tflops is not None}
    assert {dtype: flops / 1e12 for dtype, flops in gpu.peak_flops.items()} == pytest.approx(expected, rel=1e-12)
    links = [gpu.peer_bytes_per_s / 1e9, gpu.host_bytes_per_s / 1e9]
    assert [gpu.memory_bytes_per_s / 1e9, *links] == pytest.approx([gb_per_s, peer, host], rel=1e-12)
    assert gpu.memory_bytes / 2**30 == pytest.approx(gib, abs=5e-4)


@pytest.mark.parametrize("name", SHOWN)
def test_a_driver_shows_nearly_as_much_memory(name):
    share = SHOWN[name] * 2**20 / HARDWARE[name].memory_bytes
    assert 0.994 <= share <= 1


def test_capacities_are_those_of_the_memory_that_a_driver_shows():
    for gpu, model, kv_bytes in (("L4", "llama-3-8b", 131072), ("T4", "qwen3-4b", 147456)):
        cost = Roofline(gpu, model)
        usable = int(0.9 * SHOWN[gpu] * 2**20)
        assert cost.kv_capacity() == (usable - cost.weight_bytes) // kv_bytes
    assert Roofline("L4", "llama-3-8b").kv_capacity() == 43_312
