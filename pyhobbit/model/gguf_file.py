# SPDX-License-Identifier: MIT
"""The GGUF container: header in, header out.

gguf.GGUFReader is not used, because metadata must pass through bit for bit, a damaged file must be reported
by what is wrong with it, and ggml knows more tensor types than the released gguf package.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION, GGUFValueType

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.quantize import GgmlType, dequantize, type_by_id
from pyhobbit.native.files import open_regular

_MAX_NAME, _MAX_DIMS = 63, 4  # GGML_MAX_NAME less the terminating zero, GGML_MAX_DIMS
_STEP, _MOST = 1 << 16, 1 << 30  # bytes that are read at once, and of the largest header
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
    """One tensor; `ne` in ggml's order (row length first), `offset` from the start of the file `path`.

    chunks: places of its pieces, of equal size, where these do not follow each other.
    """

    name: str
    type: GgmlType
    ne: tuple[int, ...]
    path: Path
    offset: int
    chunks: tuple[tuple[Path, int], ...] = ()

    def place(self, start: int) -> tuple[Path, int]:
        """The file that holds byte `start`, and where."""
        if not self.chunks:
            return self.path, self.offset + start
        number, rest = divmod(start, self.nbytes // len(self.chunks))
        return self.chunks[number][0], self.chunks[number][1] + rest

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


class Placement(NamedTuple):
    """A tensor's entry in the header; `offset` from the start of the data."""

    name: str
    type: GgmlType
    ne: tuple[int, ...]
    offset: int


def tensor_nbytes(ggml_type: GgmlType, ne: Sequence[int]) -> int:
    return prod(ne[1:]) * ggml_type.nbytes(ne[0])


def align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


class _DamagedError(Exception):
    """Damage found in the bytes; becomes a HobbitError that names the file."""


class _UnknownError(Exception):
    """A thing that only other programs know; becomes a LoadError that names the file."""


class _Cursor:
    """Reads little-endian values off bytes, or off a file as far as they reach; never past its end."""

    def __init__(self, data: bytes, file: BinaryIO | None = None) -> None:
        self._buffer: bytes | bytearray = data if file is None else bytearray()
        self.size = len(data) if file is None else os.fstat(file.fileno()).st_size
        self._file, self.position = file, 0

    def skip(self, n: int) -> int:
        start, self.position = self.position, self.position + n
        if self.position > min(self.size, _MOST):
            raise _DamagedError("it ends in the middle of its header")
        while self._file is not None and len(self._buffer) < self.position:
            if not (part := self._file.read(_STEP)):
                raise _DamagedError("it was cut meanwhile")
            self._buffer += part
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._buffer, self.skip(struct.calcsize("<" + code)))[0]

    def string(self, errors: str = "strict") -> str:
        start = self.skip(self.scalar("Q"))
        try:
            return self.copy(start).decode(errors=errors)
        except UnicodeDecodeError as error:
            raise _DamagedError("a text in its header is not UTF-8") from error

    def value_type(self) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise _UnknownError(f"its header has a value of type {number}") from error

    def value(self, value_type: GGUFValueType) -> Any:
        if value_type in _SCALARS:
            return self.scalar(_SCALARS[value_type])
        if value_type == GGUFValueType.STRING:
            return self.string("replace")  # old converters wrote other encodings
        item_type, n = self.value_type(), self.scalar("Q")
        return [self.value(item_type) for _ in range(n)]

    def skip_value(self, value_type: GGUFValueType) -> None:
        n = 1
        if value_type == GGUFValueType.ARRAY:
            value_type, n = self.value_type(), self.scalar("Q")
        if value_type in _SCALARS:
            self.skip(n * struct.calcsize("<" + _SCALARS[value_type]))
        elif value_type == GGUFValueType.STRING:
            for _ in range(n):
                self.skip(self.scalar("Q"))
        else:
            raise _UnknownError("its header has an array of arrays")

    def copy(self, start: int) -> bytes:
        return bytes(self._buffer[start : self.position])


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header of a GGUF file, and that its data are all there. Raises LoadError."""
    try:
        with open_regular(path) as file:
            return _parse(path, cursor := _Cursor(b"", file), cursor.size)
    except _DamagedError as error:
        raise LoadError(f"{path} is damaged: {error}; download or copy it again") from error
    except OSError as error:
        raise HobbitError(f"cannot read {path}: {error.strerror}") from error


def parse_head(path: Path, data: bytes, size: int) -> GgufFile | None:
    """The header of a file of `size` bytes by its first ones; None if `data` lacks some. Raises LoadError."""
    try:
        return _parse(path, _Cursor(data), size)
    except _DamagedError:
        return None


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    if cursor.size < 4 or cursor.scalar("I") != GGUF_MAGIC:
        raise LoadError(f"{path} is {'not a GGUF file' if size else 'empty: download or copy it again'}")
    version = cursor.scalar("I")
    if not version & 0xFFFF:
        raise LoadError(f"{path} is for big-endian machines: convert it anew, or take another file")
    if version not in (2, GGUF_VERSION):
        raise LoadError(f"{path} is GGUF version {version}, but only 2 and {GGUF_VERSION} can be read")
    n_tensors, n_metadata = cursor.scalar("Q"), cursor.scalar("Q")
    try:
        metadata = _parse_metadata(cursor, n_metadata)
        given = metadata.get("general.alignment")
        alignment = given.value() if given else GGUF_DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _DamagedError(f"its alignment is {alignment}, not a power of two")
        placements = [_parse_tensor(cursor) for _ in range(n_tensors)]
    except _UnknownError as error:
        raise LoadError(
            f"{path} cannot be read: {error}; take another quantisation, or a newer pyhobbit"
        ) from error
    tensors = _place_tensors(path, size, placements, align(cursor.position, alignment), alignment)
    return GgufFile(path, size, metadata, tensors)


def _parse_metadata(cursor: _Cursor, n: int) -> dict[str, KeyValue]:
    metadata: dict[str, KeyValue] = {}
    for _ in range(n):
        key = cursor.string()
        if key in metadata:
            raise _DamagedError(f"its header has the key {key!r} twice")
        value_type, start = cursor.value_type(), cursor.position
        cursor.skip_value(value_type)
        metadata[key] = KeyValue(key, value_type, cursor.copy(start))
    return metadata


def _parse_tensor(cursor: _Cursor) -> Placement:
    name = cursor.string()
    n_dims = cursor.scalar("I")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise _DamagedError(f"tensor {name!r} has {n_dims} dimensions")
    ne = tuple(cursor.scalar("Q") for _ in range(n_dims))
    type_id = cursor.scalar("I")
    ggml_type = type_by_id(type_id)
    if ggml_type is None:
        raise _UnknownError(f"tensor {name!r} has the type {type_id}, perhaps one of ik_llama.cpp's own")
    if ne[0] % ggml_type.block:
        raise _DamagedError(
            f"tensor {name!r} has rows of {ne[0]} values, not whole blocks of {ggml_type.name}"
        )
    return Placement(name, ggml_type, ne, cursor.scalar("Q"))


def _place_tensors(
    path: Path, file_size: int, placements: Iterable[Placement], start: int, alignment: int
) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for name, ggml_type, ne, offset in placements:
        tensor = TensorInfo(name, ggml_type, ne, path, start + offset)
        if name in tensors:
            raise _DamagedError(f"its header has the tensor {name!r} twice")
        if offset != expected:
            raise _DamagedError(f"tensor {name!r} is said to lie at {offset}, not at {expected}")
        end = tensor.offset + tensor.nbytes
        if end > file_size:
            raise LoadError(
                f"{path} is truncated: tensor {name!r} ends at byte {end}, the file at {file_size}; "
                "download or copy it again"
            )
        tensors[name] = tensor
        expected = align(offset + tensor.nbytes, alignment)
    return tuple(tensors.values())


def read_floats(tensor: TensorInfo) -> np.ndarray:
    """The values of a tensor, float32, in numpy's order of dimensions."""
    data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return dequantize(tensor.type, data, tensor.ne[0]).reshape(tensor.ne[::-1])


def scalar_entry(key: str, value_type: GGUFValueType, value: int | float | bool) -> KeyValue:
    return KeyValue(key, value_type, struct.pack("<" + _SCALARS[value_type], value))


def string_entry(key: str, value: str) -> KeyValue:
    return KeyValue(key, GGUFValueType.STRING, _pack_string(value))


def strings_entry(key: str, values: Sequence[str]) -> KeyValue:
    head = struct.pack("<IQ", GGUFValueType.STRING, len(values))
    return KeyValue(key, GGUFValueType.ARRAY, head + b"".join(map(_pack_string, values)))


def numbers_entry(key: str, item_type: GGUFValueType, values: Sequence[float]) -> KeyValue:
    head = struct.pack("<IQ", item_type, len(values))
    items = struct.pack(f"<{len(values)}{_SCALARS[item_type]}", *values)
    return KeyValue(key, GGUFValueType.ARRAY, head + items)


def _pack_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_header(metadata: Sequence[KeyValue], placements: Iterable[Placement], alignment: int) -> bytes:
    """The header with its padding."""
    infos = []
    for name, ggml_type, ne, offset in placements:
        if len(name.encode()) > _MAX_NAME:
            raise HobbitError(f"the tensor name {name!r} would be longer than {_MAX_NAME} bytes")
        numbers = struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, ggml_type.id, offset)
        infos.append(_pack_string(name) + numbers)
    entries = [_pack_string(entry.key) + struct.pack("<I", entry.type) + entry.raw for entry in metadata]
    head = struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, len(infos), len(entries))
    header = b"".join([head, *entries, *infos])
    return header.ljust(align(len(header), alignment), b"\0")
