"""The GGUF container: metadata and quantised tensors, each bound checked before it is read."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.packed_weight import PackedWeight, from_blocks

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMS = 4


class _Cursor:
    """A position in a file's bytes; reading past the end raises `ModelFileError`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what} (at byte {self.offset} of {len(self.data)})")

    def take(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self.data):
            raise self.fail(f"truncated or malformed: {count} more bytes expected")
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        (length,) = _LENGTH.unpack(self.take(8))
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"malformed: text that is not UTF-8: {error.reason}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fail(f"malformed: unknown value type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            item = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self.take(count * item.itemsize), item).tolist()
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        raise self.fail(f"malformed: array of unknown value type {kind}")


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy counts (GGUF stores the reverse)."""
    quantization: gguf.GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GGUFFile:
    """An open GGUF file, version 2 or 3, little-endian.

    The file is mapped, not read: `metadata` and `tensors` are parsed at once, weights when `tensor` is called.
    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader takes two seconds
    for a vocabulary of 49k tokens and lets broken files raise whatever they cause, so only its dequantisers are used.

    Parameters
    ----------
    path : Path

    Raises
    ------
    ModelFileError
        The file is missing, is not GGUF, is cut short or contradicts itself.
    UnsupportedModelError
        A version or byte order that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(8)
                if head[:4] != _MAGIC:
                    hint = "for a Hugging Face model give its directory"
                    raise ModelFileError(
                        f"{path}: not a GGUF file: it starts with {head[:4]!r}, not {_MAGIC!r}; {hint}"
                    )
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
        cursor = _Cursor(path, data)
        cursor.take(len(_MAGIC))
        version = cursor.number("I")
        if version not in _VERSIONS:
            order = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise UnsupportedModelError(
                f"{path}: GGUF version {version}{order}; versions 2 and 3, little-endian, are read"
            )
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
        self._data = data
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text()
            if key in self.metadata:
                raise cursor.fail(f"malformed: the key {key} appears twice")
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, _TensorInfo]:
        headers = []
        for _ in range(count):
            name, num_dims = cursor.text(), cursor.number("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise cursor.fail(f"malformed: tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
            dims = [cursor.number("Q") for _ in range(num_dims)]
            headers.append((name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.fail(f"malformed: general.alignment must be an integer ≥ 1, got {alignment!r}")
        start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, _TensorInfo] = {}
        for name, shape, kind, offset in headers:
            if name in tensors:
                raise cursor.fail(f"malformed: tensor {name} appears twice")
            tensors[name] = self._tensor_info(name, shape, kind, start + offset)
        return tensors

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> _TensorInfo:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has the unknown quantisation type {kind}"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        if 0 in shape or shape[-1] % block:
            detail = f"shape {shape} is empty or its rows are not whole blocks of {block}"
            raise ModelFileError(f"{self.path}: malformed: tensor {name}: {detail}")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._data):
            limits = f"bytes {offset} to {offset + num_bytes}, but the file ends at {len(self._data)}"
            raise ModelFileError(f"{self.path}: truncated or malformed: tensor {name} should be {limits}")
        return _TensorInfo(shape, quantization, offset, num_bytes)

    def _raw(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)

    def packed(self, name: str) -> PackedWeight | None:
        """Read one matrix without dequantising it; None unless its type is Q4_0, Q4_1 or Q8_0."""
        info = self.tensors[name]
        if len(info.shape) != 2:
            return None
        block_bytes = gguf.GGML_QUANT_SIZES[info.quantization][1]
        return from_blocks(info.quantization.name, self._raw(name).reshape(-1, block_bytes), info.shape[0])

    def tensor(self, name: str) -> np.ndarray:
        """Dequantise one tensor to a new float32 array; a name that isn't there raises `ModelFileError`."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: has no tensor {name}")
        info, raw = self.tensors[name], self._raw(name)
        # Blocks are independent: few wide rows cost the dequantisers a third of what the tensor's own rows do.
        block_bytes = gguf.GGML_QUANT_SIZES[info.quantization][1]
        num_blocks = info.num_bytes // block_bytes
        try:
            # Whether the values are usable is for the caller to say: garbage scales may overflow here.
            with np.errstate(all="ignore"):
                rows = raw.reshape(-1, math.gcd(num_blocks, 64) * block_bytes)
                values = gguf.dequantize(rows, info.quantization)
        except NotImplementedError as error:
            kind = info.quantization.name
            raise UnsupportedModelError(f"{self.path}: tensor {name} is {kind}, which cannot be dequantised") from error
        # "W" copies what still is a view of the (read-only) file.
        return np.require(values, np.float32, ["C", "A", "W"]).reshape(info.shape)
