# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors files of bounded size, which is there as a whole or not at all."""

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import secrets
import shutil

from rooftile.checkpoints.folder import INDEX, SINGLE
from rooftile.errors import ArgumentError


def check_target(path, source, overwrite):
    """Raises ArgumentError where `path` must not be written: before the work starts."""
    path, source = pathlib.Path(path).absolute(), pathlib.Path(source).resolve()
    if not path.parent.is_dir():
        raise ArgumentError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"{path}: {path.parent} cannot be written")
    if path.resolve() == source or source in path.resolve().parents or path.resolve() in source.parents:
        raise ArgumentError(f"{path}: lies in {source} or around it; expected a folder beside it")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ArgumentError(f"{path}: is there and is not a folder")
    if not path.exists():
        return
    if any(path.iterdir()):
        if not overwrite:
            raise ArgumentError(f"{path}: is there and not empty; --overwrite replaces it")
        if not (path / "config.json").is_file():
            raise ArgumentError(f"{path}: holds no config.json, so it is no model to replace; expected another folder")


@contextlib.contextmanager
def written_whole(path, replace=False):
    """Yields a new folder beside `path`, which takes its place when the block ends well and is deleted otherwise.

    replace: whether a folder that is there by then is deleted; without, only an empty one is. Raises ArgumentError for
    whatever the file system refuses. At any moment `path` is what it was or the new folder whole; where the file system
    cannot exchange two folders in one step, a process killed between two renames leaves the old one beside it, as
    NAME.old-*.
    """
    path = pathlib.Path(path).absolute()
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        draft.mkdir()
        yield draft
        if replace and path.exists():
            _to_disk(draft)
            _replace(draft, path)
        else:
            draft.rename(path)
    except OSError as e:
        raise ArgumentError(f"{path}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(new, path):
    """Puts the folder `new` in the place of the folder `path`, and deletes what was there."""
    if _exchange(new, path):
        return  # `new` is now the old one, which written_whole deletes
    old = path.parent / f"{path.name}.old-{secrets.token_hex(4)}"
    path.rename(old)
    try:
        new.rename(path)
    except BaseException as e:
        try:
            old.rename(path)
        except OSError:
            raise ArgumentError(f"{path}: {e}; what was there is now {old}") from e
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a, b):
    """Exchanges two folders in one step. False where the C library, the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(b))


def _to_disk(folder):
    """Waits until the files of a folder are on the disk, so that a machine that stops later has them."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ShardWriter:
    """Tensors into safetensors files of at most `shard_bytes` (one tensor or module alone may be larger)."""

    def __init__(self, folder, shard_bytes):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.pending, self.pending_bytes = {}, 0
        self.files = []  # names of the tensors in each
        self.total = 0

    def add(self, tensors):
        """tensors: name -> torch tensor, which lie in one file."""
        size = sum(t.nbytes for t in tensors.values())
        if self.pending and self.pending_bytes + size > self.shard_bytes:
            self._flush()
        self.pending.update(tensors)
        self.pending_bytes += size
        self.total += size

    def _flush(self):
        import safetensors.torch

        path = self.folder / f"part-{len(self.files)}"
        try:
            safetensors.torch.save_file(
                {name: t.contiguous() for name, t in self.pending.items()}, path, metadata={"format": "pt"}
            )
        except safetensors.SafetensorError as e:
            raise OSError(str(e)) from e
        path.chmod(self.folder.stat().st_mode & 0o666)  # as the umask says; the library keeps it from all others
        self.files.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def close(self):
        """Writes what is left, gives the files their names, and an index where there are several."""
        if self.pending or not self.files:
            self._flush()
        count, where = len(self.files), {}
        for i, names in enumerate(self.files):
            name = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{i}").rename(self.folder / name)
            where.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
            write_json(self.folder / INDEX, index)


def write_json(path, value):
    """In ASCII: a string from another file may hold what UTF-8 cannot."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")
