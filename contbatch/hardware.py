"""What a device can do at most: arithmetic, memory and links. Figures of the makers' data sheets, dense, per device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from contbatch.checks import (
    is_int,
    is_one_of,
    python_number,
    require,
    require_positive,
    require_type,
    take_python_numbers,
)
from contbatch.errors import CostModelError

_require = partial(require, error=CostModelError)

DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8": 1, "int8": 1}
"""Bytes of a number, by the name of its type."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Parameters
    ----------
    name : str
    peak_flops : mapping of str to float
        Multiplications and additions per second of matrix products, by type (a key of `DTYPE_BYTES`), without
        sparsity, accumulating in 32 bits.
    memory_bytes_per_s : float
    memory_bytes : int
    peer_bytes_per_s : float
        Of the link to other devices of its kind, one direction.
    host_bytes_per_s : float
        Of the link to the host's memory, one direction.
    source : str
        Where the figures come from.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    memory_bytes: int
    peer_bytes_per_s: float
    host_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_type("name", self.name, str, CostModelError)
        require_type("peak_flops", self.peak_flops, Mapping, CostModelError)
        object.__setattr__(self, "peak_flops", {dtype: python_number(n) for dtype, n in self.peak_flops.items()})
        for dtype, flops in self.peak_flops.items():
            _require(is_one_of(dtype, DTYPE_BYTES), "a type of peak_flops", dtype, f"one of {', '.join(DTYPE_BYTES)}")
            require_positive(CostModelError, **{f"peak_flops of {dtype}": flops})
        for name in ("memory_bytes_per_s", "peer_bytes_per_s", "host_bytes_per_s"):
            require_positive(CostModelError, **{name: getattr(self, name)})
        _require(is_int(self.memory_bytes, 1), "memory_bytes", self.memory_bytes, "an integer ≥ 1")


PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
"""Bytes per second of 16 lanes in one direction, rounded as the data sheets do (64 GB/s for both, PCIe 4)."""


def _gpu(
    name: str,
    tflops: Mapping[str, float],
    gb_per_s: float,
    gib: float,
    links: tuple[float, float],
    source: str,
) -> Hardware:
    peak = {dtype: value * 1e12 for dtype, value in tflops.items()}
    return Hardware(name, peak, gb_per_s * 1e9, int(gib * GIB), *links, source)


def _same(half: float, **others: float) -> dict[str, float]:
    return {"f16": half, "bf16": half, **others}


_HOPPER = _same(989.4, f8=1978.9, int8=1978.9, f32=66.9)
_AMPERE = _same(312, int8=624, f32=19.5)
_NVIDIA = "NVIDIA data sheet"
_SHOWN = "memory: nvidia-smi, in pull request 2797 of modal-labs/modal-client"
_L4, _L40S, _T4 = 23034 / 1024, 46068 / 1024, 15360 / 1024
"""GiB that the driver shows of 24, 48 and 16: a sixteenth of GDDR6 holds the codes of its ECC."""
_LIST = (
    _gpu("A100-40GB", _AMPERE, 1555, 40, (300e9, PCIE4), f"{_NVIDIA} A100, SXM"),
    _gpu("A100-80GB", _AMPERE, 2039, 80, (300e9, PCIE4), f"{_NVIDIA} A100, SXM"),
    _gpu("H100", _HOPPER, 3350, 80, (450e9, PCIE5), f"{_NVIDIA} H100, SXM; Hopper architecture white paper"),
    _gpu("H200", _HOPPER, 4800, 141, (450e9, PCIE5), f"{_NVIDIA} H200, SXM; arithmetic as H100"),
    _gpu("B200", _same(2250, f8=4500, int8=4500, f32=75), 8000, 180, (900e9, PCIE5), f"{_NVIDIA} DGX B200 / 8"),
    _gpu("L4", _same(121, f8=242.5, int8=242.5, f32=30.3), 300, _L4, (PCIE4, PCIE4), f"{_NVIDIA} L4; {_SHOWN}"),
    _gpu("L40S", _same(362, f8=733, int8=733, f32=91.6), 864, _L40S, (PCIE4, PCIE4), f"{_NVIDIA} L40S; {_SHOWN}"),
    _gpu("RTX-3090", _same(71, int8=284, f32=35.6), 936, 24, (PCIE4, PCIE4), "NVIDIA GA102 architecture white paper"),
    _gpu(
        "RTX-4090",
        _same(165.2, f8=330.3, int8=660.6, f32=82.6),
        1008,
        24,
        (PCIE4, PCIE4),
        "NVIDIA Ada architecture white paper",
    ),
    _gpu(
        "RTX-5090",
        _same(209.5, f8=419, int8=838, f32=104.8),
        1792,
        32,
        (PCIE5, PCIE5),
        "NVIDIA RTX Blackwell architecture white paper",
    ),
    _gpu(
        "T4",
        {"f16": 65, "int8": 130, "f32": 8.1},
        320,
        _T4,
        (PCIE3, PCIE3),
        f"NVIDIA Turing architecture white paper; {_SHOWN}",
    ),
    _gpu(
        "laptop-cpu",
        {"f32": 0.768},
        89.6,
        16,
        (PCIE4, 89.6e9),
        "assumed, no data sheet: 8 cores × 3 GHz × 32 operations (two 8-wide multiply-adds); two channels DDR5-5600",
    ),
)
HARDWARE = {hardware.name: hardware for hardware in _LIST}
"""By name. Capacities of L4, L40S and T4 are what nvidia-smi shows; of the others the gigabytes of their names taken as
GiB, of which it shows at most 0.6 % less."""


def hardware(name: str | Hardware) -> Hardware:
    """Find a device by name; `CostModelError` lists those that are known."""
    if isinstance(name, Hardware):
        return name
    _require(is_one_of(name, HARDWARE), "gpu", name, f"a Hardware or one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
