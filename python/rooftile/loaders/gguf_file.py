# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, read with every count, length and offset checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  gguf.GGUFReader reads the same, but it believes
the counts it finds (a flipped bit makes it loop for ever or raise an IndexError) and maps the file (a file cut short
under it is a SIGBUS), so only its tables of types are used here.
"""

import dataclasses
import itertools
import math
import os
import struct

import numpy as np

from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from rooftile.loaders.regular import check_regular

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NESTING = 4  # arrays in arrays; files in use have none

# value type number -> struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` is row-major (torch's order), `offset` counts from the start of the file."""

    name: str
    type: object  # gguf.GGMLQuantizationType
    shape: tuple
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file's header says.

    metadata: key -> int, float, bool, str or a list of these. tensors: name -> TensorInfo.
    """

    path: str
    version: int
    metadata: dict
    tensors: dict

    def get(self, key, kind, default=None):
        """metadata[key], checked to be a `kind` (int, float, bool, str, list). Raises ArgumentError when it is missing
        and there is no default, or is something else."""
        if key not in self.metadata:
            if default is None:
                raise ArgumentError(f"{self.path}: metadata key '{key}' is missing")
            return default
        value = self.metadata[key]
        if type(value) is not kind:
            raise ArgumentError(f"{self.path}: metadata key '{key}' must be {kind.__name__}, got {describe(value)}")
        return value

    def read(self, name):
        """The bytes of tensor `name` as they lie in the file: uint8 [nbytes]."""
        info = self.tensors[name]
        try:
            data = np.fromfile(self.path, np.uint8, info.nbytes, offset=info.offset)
        except OSError as e:
            raise ArgumentError(f"{self.path}: cannot read tensor '{name}': {e.strerror or e}") from e
        if data.size != info.nbytes:
            raise ArgumentError(
                f"{self.path}: tensor '{name}' is cut short: {data.size} of {info.nbytes} bytes, "
                "the file changed while it was being read"
            )
        return data


def describe(value):
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def read_gguf(path):
    """The header of the GGUF file at `path`, as a GGUFFile: metadata and tensor directory, no tensor data.

    Versions 2 and 3, little-endian. Raises ArgumentError naming the file, the key or tensor, what came and what was
    expected, for anything that is not a whole GGUF file; NotSupportedError for one of another version, byte order or
    tensor type.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"read_gguf: path must be a path, got {type(path).__name__}")
    path = os.fspath(path)
    check_regular(path, f"model file '{path}'")
    try:
        with open(path, "rb") as f:
            return _Header(path, f).read()
    except OSError as e:
        raise ArgumentError(f"model file '{path}': {e.strerror or e}") from e


class _Header:
    def __init__(self, path, file):
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def read(self):
        magic = self.take(min(4, self.size), "the magic number")
        if magic != _MAGIC:
            raise ArgumentError(f"{self.path}: not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}")
        version = self.number("I", "the version")
        if version & 0xFFFF == 0 and version:
            raise NotSupportedError(f"{self.path}: big-endian GGUF files are not supported, only little-endian")
        if version not in _VERSIONS:
            raise NotSupportedError(f"{self.path}: GGUF version {version} is not supported; supported: 2, 3")
        tensor_count = self.count("the tensor count", 24)  # name length, dimension count, type, offset
        key_count = self.count("the metadata count", 13)  # key length, type, one byte

        metadata = {}
        for i in range(key_count):
            key = self.string(f"the name of metadata key {i} of {key_count}")
            if key in metadata:
                raise ArgumentError(f"{self.path}: metadata key '{key}' occurs twice")
            what = f"metadata key '{key}'"
            metadata[key] = self.value(self.number("I", what), what)

        directory = [self.tensor(i, tensor_count) for i in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ArgumentError(
                f"{self.path}: metadata key 'general.alignment' must be a power of two, got {describe(alignment)}"
            )
        start = -(-self.position // alignment) * alignment
        tensors = {}
        for info in directory:
            if info.name in tensors:
                raise ArgumentError(f"{self.path}: tensor '{info.name}' occurs twice")
            if info.offset % alignment:
                raise ArgumentError(
                    f"{self.path}: tensor '{info.name}' has offset {info.offset}, expected a multiple of {alignment}"
                )
            end = start + info.offset + info.nbytes
            if end > self.size:
                raise ArgumentError(
                    f"{self.path}: tensor '{info.name}' ends at byte {end}, but the file has {self.size} bytes: "
                    "it is truncated or its directory is corrupt"
                )
            tensors[info.name] = dataclasses.replace(info, offset=start + info.offset)
        self.check_overlap(tensors)
        return GGUFFile(self.path, version, metadata, tensors)

    def check_overlap(self, tensors):
        ordered = sorted(tensors.values(), key=lambda info: info.offset)
        for a, b in itertools.pairwise(ordered):
            if a.offset + a.nbytes > b.offset:
                raise ArgumentError(
                    f"{self.path}: tensors '{a.name}' and '{b.name}' overlap at byte {b.offset}: "
                    "the directory is corrupt"
                )

    def tensor(self, i, count):
        import gguf

        name = self.string(f"the name of tensor {i} of {count}")
        what = f"the directory entry of tensor '{name}'"
        dims = self.number("I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise ArgumentError(f"{self.path}: tensor '{name}' has {dims} dimensions, expected 1 to {_MAX_DIMS}")
        # the file has the fastest dimension first
        shape = tuple(self.number("Q", what) for _ in range(dims))[::-1]
        number = self.number("I", what)
        offset = self.number("Q", what)
        try:
            type_ = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        except (ValueError, KeyError):
            known = ", ".join(f"{t.value} {t.name}" for t in gguf.GGMLQuantizationType)
            raise NotSupportedError(
                f"{self.path}: tensor '{name}' has the unknown type number {number}; known: {known}"
            ) from None
        if 0 in shape:
            raise ArgumentError(f"{self.path}: tensor '{name}' is empty: shape {list(shape)}")
        if shape[-1] % block:
            raise ArgumentError(
                f"{self.path}: tensor '{name}' has rows of {shape[-1]} elements, "
                f"expected a multiple of {block} for type {type_.name}"
            )
        return TensorInfo(name, type_, shape, offset, math.prod(shape) // block * block_bytes)

    def value(self, kind, what, nesting=0):
        if kind in _SCALARS:
            value = self.number("B" if kind == _BOOL else _SCALARS[kind], what)
            return self.boolean(value, what) if kind == _BOOL else value
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self.array(what, nesting)
        raise ArgumentError(f"{self.path}: {what} has the value type number {kind}, expected 0 to 12")

    def array(self, what, nesting):
        kind = self.number("I", what)
        if kind in _SCALARS and kind != _BOOL:
            code = _SCALARS[kind]
            length = self.count(f"the length of {what}", struct.calcsize(code))
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize(code), what)))
        length = self.count(f"the length of {what}", {_BOOL: 1, _STRING: 8}.get(kind, 12))
        return [self.value(kind, f"{what}, element {i}", nesting + 1) for i in range(length)]

    def boolean(self, value, what):
        if value not in (0, 1):
            raise ArgumentError(f"{self.path}: {what} must be a boolean (0 or 1), got {value}")
        return bool(value)

    def string(self, what):
        raw = self.take(self.count(f"the length of {what}", 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ArgumentError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from None

    def count(self, what, item_bytes):
        """A 64-bit number of items, each at least `item_bytes` long, that must still fit into the file."""
        n = self.number("Q", what)
        left = self.size - self.position
        if n * item_bytes > left:
            raise ArgumentError(
                f"{self.path}: {what} is {n}, more than the {left} bytes left can hold: "
                "the file is truncated or corrupt"
            )
        return n

    def number(self, code, what):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def take(self, n, what):
        data = self.file.read(n)
        if len(data) != n:
            raise ArgumentError(
                f"{self.path}: the file ends inside {what}: {n} bytes expected at byte {self.position}, "
                f"{len(data)} there"
            )
        self.position += n
        return data
