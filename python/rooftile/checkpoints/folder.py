# SPDX-License-Identifier: Apache-2.0
"""A folder with config.json and safetensors files, every name, size and number checked before it is believed."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib

from rooftile._arrays import aligned
from rooftile.errors import ArgumentError
from rooftile.loaders.regular import check_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_JSON_BYTES, _JSON_DEPTH = 100 * 2**20, 100  # the most that is read
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # others are refused by name later


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor: `dtype` is safetensors' name of it, such as "BF16"; `file` the path of the file that holds it."""

    name: str
    dtype: str
    shape: tuple
    file: str
    nbytes: int


class TensorFolder:
    """config: config.json as a dict. tensors: name -> TensorInfo. Only headers are read until `read` is called.

    Raises ArgumentError naming the file, what came and what was expected: no such folder, a config.json that is not
    JSON, an index that names files that are missing or outside the folder, a file whose header is cut, corrupt or does
    not fill it, a tensor in two files or in none.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise ArgumentError(f"{path}: not a folder; expected one with config.json and safetensors files")
        self.config = read_json(self.path / "config.json")
        self.tensors = {}
        for name in self._file_names():
            for info in safetensors_header(self.path / name):
                if info.name in self.tensors:
                    other = self.tensors[info.name].file
                    raise ArgumentError(f"{info.file}: tensor '{info.name}' is in {other} too; expected in one file")
                self.tensors[info.name] = info
        self._check_index()

    def _file_names(self):
        index, single = self.path / INDEX, self.path / SINGLE
        if index.exists() == single.exists():
            came = "both are" if index.exists() else "neither is"
            raise ArgumentError(f"{self.path}: {SINGLE}, {INDEX}: {came} there; expected one of them")
        self._map = None
        if single.exists():
            return [SINGLE]
        self._map = read_json(index).get("weight_map")
        if not (isinstance(self._map, dict) and self._map and all(isinstance(v, str) for v in self._map.values())):
            raise ArgumentError(f"{index}: weight_map must map tensors to files, got {self._map!r:.60}")
        names = sorted(set(self._map.values()))
        for name in names:
            if pathlib.PurePath(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise ArgumentError(f"{index}: weight_map names {name!r}, expected a .safetensors file in this folder")
        return names

    def _check_index(self):
        for name, file in (self._map or {}).items():
            if name not in self.tensors or os.path.basename(self.tensors[name].file) != file:
                raise ArgumentError(f"{self.path / file}: tensor '{name}' is missing; {INDEX} says it is here")

    def read(self, name, index=None):
        """The torch tensor `name`, in host memory; with an index, this part of its first dimension alone."""
        info = self.tensors[name]
        with _open(info.file) as file:
            return aligned(file.get_tensor(name) if index is None else file.get_slice(name)[index])


def read_json(path):
    """The object in the JSON file at `path`."""
    check_regular(path, path)
    if (size := os.stat(path).st_size) > _JSON_BYTES:
        raise ArgumentError(f"{path}: expected at most {_JSON_BYTES} bytes of JSON, got {size}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ArgumentError(f"{path}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise ArgumentError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ArgumentError(f"{path}: expected a JSON object, got {type(value).__name__}")
    level = [value]
    for _ in range(_JSON_DEPTH):
        level = [
            item for v in level for item in (v.values() if isinstance(v, dict) else v) if isinstance(item, dict | list)
        ]
    if level:
        raise ArgumentError(f"{path}: expected objects and lists at most {_JSON_DEPTH} deep in each other")
    return value


@contextlib.contextmanager
def _open(path):
    import safetensors

    check_regular(path, path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except OSError as e:
        raise ArgumentError(f"{path}: {e.strerror or e}") from e
    except safetensors.SafetensorError as e:
        raise ArgumentError(f"{path}: not a whole safetensors file: {e}") from e


def safetensors_header(path):
    """Every tensor of a safetensors file, as TensorInfo."""
    with _open(path) as file:
        for name in file.keys():
            view = file.get_slice(name)
            dtype, shape = view.get_dtype(), tuple(view.get_shape())
            yield TensorInfo(name, dtype, shape, str(path), math.prod(shape) * _BYTES.get(dtype, 1))
