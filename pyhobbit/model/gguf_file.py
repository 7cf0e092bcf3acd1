# SPDX-License-Identifier: MIT
"""The GGUF container: header in, header out. The engine checks headers; here its bytes are taken apart.

gguf.GGUFReader is not used, because metadata must pass through bit for bit, and ggml knows more tensor types.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUF_MAGIC, GGUF_VERSION, GGUFValueType

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.quantize import GgmlType, dequantize, type_of
from pyhobbit.native.files import open_regular, os_errors

_MAX_NAME = 63  # GGML_MAX_NAME less the terminating zero
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


Placement = tuple[str, GgmlType, tuple[int, ...], int]
"""A tensor's entry in a header: name, type, ne, and offset from the start of the data."""


@dataclass(frozen=True)
class KeyValue:
    """One metadata entry; `raw` is its value as encoded in the file."""

    key: str
    type: GGUFValueType
    raw: bytes

    def value(self) -> Any:
        return _Cursor(self.raw).value(self.type)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor; `ne` in ggml's order (row length first), `offset` from the start of the file `path`."""

    name: str
    type: GgmlType
    ne: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.type, self.ne)

    @property
    def n_values(self) -> int:
        return prod(self.ne)


@dataclass(frozen=True)
class GgufFile:
    path: Path
    size: int
    metadata: dict[str, KeyValue]
    tensors: tuple[TensorInfo, ...]

    def get(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default`. Raises HobbitError unless both have the same type."""
        if key not in self.metadata:
            return default
        value = self.metadata[key].value()
        if type(value) is not type(default):
            raise HobbitError(f"{self.path} is damaged: its key {key} is {value!r}; copy it again")
        return value


def tensor_nbytes(ggml_type: GgmlType, ne: Sequence[int]) -> int:
    return prod(ne[1:]) * ggml_type.nbytes(ne[0])


def align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


class _Cursor:
    """Reads little-endian values off the bytes of a header that the engine has checked."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def take(self, n: int) -> bytes:
        self.position += n
        return self.data[self.position - n : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode(errors="replace")  # old converters wrote other encodings

    def value(self, value_type: GGUFValueType) -> Any:
        if value_type == GGUFValueType.ARRAY:
            item_type, n = GGUFValueType(self.scalar("I")), self.scalar("Q")
            return [self.value(item_type) for _ in range(n)]
        return self.string() if value_type == GGUFValueType.STRING else self.scalar(_SCALARS[value_type])

    def skip_value(self, value_type: GGUFValueType) -> None:
        n = 1
        if value_type == GGUFValueType.ARRAY:
            value_type, n = GGUFValueType(self.scalar("I")), self.scalar("Q")
        if value_type in _SCALARS:
            self.take(n * struct.calcsize(_SCALARS[value_type]))
        for _ in range(n if value_type == GGUFValueType.STRING else 0):
            self.take(self.scalar("Q"))


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, whose data are all there. Raises LoadError, HobbitError."""
    try:
        with os_errors(f"cannot read {path}"), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            n = _checked(path, b"", size)
            return _parse(path, file.read(n), n, size)
    except struct.error as error:
        raise HobbitError(f"{path} was changed while it was read") from error


def parse_head(path: Path, data: bytes, size: int) -> GgufFile | None:
    """The header of a file of `size` bytes by its first ones; None if `data` lacks some. Raises LoadError."""
    n = _checked(path, data, size)
    return _parse(path, data, n, size) if n else None


def _checked(path: Path, data: bytes, size: int) -> int:
    """Bytes of a sound header; 0 if it goes on behind `data`. Raises LoadError, HobbitError."""
    from pyhobbit.native.hobbit_c import ffi, lib  # at the first use, as quantize.py

    fault, err = ffi.new("enum hobbit_header_fault *"), ffi.new("char[]", 4096)
    given = ffi.from_buffer(data) if data else ffi.NULL
    n: int = lib.hobbit_check_header(bytes(path), given, len(data), size, fault, err, len(err))
    if not n and not (data and fault[0] == lib.HOBBIT_HEADER_CUT):
        kind = HobbitError if fault[0] == lib.HOBBIT_HEADER_NOT_READ else LoadError
        raise kind(ffi.string(err).decode(errors="replace"))
    return n


def _parse(path: Path, data: bytes, start: int, size: int) -> GgufFile:
    cursor = _Cursor(data, 8)
    n_tensors, n_values = cursor.scalar("Q"), cursor.scalar("Q")
    values = {entry.key: entry for entry in (_parse_value(cursor) for _ in range(n_values))}
    return GgufFile(path, size, values, tuple(_parse_tensor(cursor, path, start) for _ in range(n_tensors)))


def _parse_value(cursor: _Cursor) -> KeyValue:
    key, value_type, start = cursor.string(), GGUFValueType(cursor.scalar("I")), cursor.position
    cursor.skip_value(value_type)
    return KeyValue(key, value_type, cursor.data[start : cursor.position])


def _parse_tensor(cursor: _Cursor, path: Path, start: int) -> TensorInfo:
    name, n_dims = cursor.string(), cursor.scalar("I")
    ne = tuple(cursor.scalar("Q") for _ in range(n_dims)) or (1,)
    return TensorInfo(name, type_of(cursor.scalar("I")), ne, path, start + cursor.scalar("Q"))


def read_floats(tensor: TensorInfo) -> np.ndarray:
    """The values of a tensor, float32, in numpy's order of dimensions."""
    data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return dequantize(tensor.type, data, tensor.ne[0]).reshape(tensor.ne[::-1])


def scalar_entry(key: str, value_type: GGUFValueType, value: int | float | bool) -> KeyValue:
    return KeyValue(key, value_type, _packed(value, value_type))


def string_entry(key: str, value: str) -> KeyValue:
    return KeyValue(key, GGUFValueType.STRING, _packed(value))


def array_entry(key: str, item_type: GGUFValueType, values: Sequence[float | str]) -> KeyValue:
    head = struct.pack("<IQ", item_type, len(values))
    return KeyValue(key, GGUFValueType.ARRAY, head + b"".join(_packed(each, item_type) for each in values))


def _packed(value: float | str, value_type: GGUFValueType = GGUFValueType.STRING) -> bytes:
    if not isinstance(value, str):
        return struct.pack("<" + _SCALARS[value_type], value)
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pack_header(metadata: Sequence[KeyValue], placements: Iterable[Placement], alignment: int) -> bytes:
    """The header with its padding."""
    infos = []
    for name, ggml_type, ne, offset in placements:
        if len(name.encode()) > _MAX_NAME:
            raise HobbitError(f"the tensor name {name!r} would be longer than {_MAX_NAME} bytes")
        numbers = struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, ggml_type.id, offset)
        infos.append(_packed(name) + numbers)
    entries = [_packed(entry.key) + struct.pack("<I", entry.type) + entry.raw for entry in metadata]
    head = struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, len(infos), len(entries))
    header = b"".join([head, *entries, *infos])
    return header.ljust(align(len(header), alignment), b"\0")
