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


def check_utf8(text, option):
    """A text of the command line or of standard input, whose bytes may be no UTF-8: Python keeps them as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ArgumentError(f"{option}: not UTF-8 text: {e.reason} at character {e.start}") from None
    return text


def check_writable(path, option, **others):
    """Raises before the work starts when `path` cannot be written after it, or is what the command reads or writes.

    None is no file. others: name of an argument -> its path or None; a folder with all that is in it.
    """
    if path is None:
        return
    if os.fspath(path) == "-":
        raise ArgumentError(f"{option} -: expected a file; standard output shows the figures")
    for name, other in others.items():
        if other is not None and _is_or_is_in(path, other):
            raise ArgumentError(f"{option} {path}: is (or lies in) {name}; expected another file")
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"{option} {path}: the folder {folder} does not exist")
    if os.path.isdir(path):
        raise ArgumentError(f"{option} {path}: is a folder, expected a file to write")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ArgumentError(f"{option} {path}: cannot be written")


def _is_or_is_in(path, other):
    path, other = pathlib.Path(path).resolve(), pathlib.Path(other).resolve()
    if path.exists() and other.exists() and path.samefile(other):  # a hard link too
        return True
    return path == other or other in path.parents


def write_json(path, value, option):
    try:
        pathlib.Path(path).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise ArgumentError(f"{option} {path}: {e.strerror or e}") from e
