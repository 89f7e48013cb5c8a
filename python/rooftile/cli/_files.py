# SPDX-License-Identifier: Apache-2.0
"""Files named on the command line: whatever is wrong with one is an ArgumentError that names the option."""

import json
import os
import pathlib

from rooftile.errors import ArgumentError


def read_text(path, option):
    """The UTF-8 text of the file at `path`."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ArgumentError(f"{option} {path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise ArgumentError(f"{option} {path}: not UTF-8 text: {e.reason} at byte {e.start}") from e


def check_writable(path, option):
    """Raises before the work starts when `path` cannot be written after it. None is no file."""
    if path is None:
        return
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"{option} {path}: the folder {folder} does not exist")
    if os.path.isdir(path):
        raise ArgumentError(f"{option} {path}: is a folder, expected a file to write")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ArgumentError(f"{option} {path}: cannot be written")


def write_json(path, value, option):
    try:
        pathlib.Path(path).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise ArgumentError(f"{option} {path}: {e.strerror or e}") from e
