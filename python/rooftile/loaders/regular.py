# SPDX-License-Identifier: Apache-2.0
"""What is opened is a file: a FIFO would make the reader wait for a writer, a device never ends."""

import os
import stat

from rooftile.errors import ArgumentError

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def check_regular(path, what):
    """Raises ArgumentError, beginning with `what`, unless `path` is a regular file or a link to one. Opens nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as e:  # the second: a null character in the name
        raise ArgumentError(f"{what}: {getattr(e, 'strerror', None) or e}") from e
    if not stat.S_ISREG(mode):
        raise ArgumentError(f"{what}: is a {_KINDS.get(stat.S_IFMT(mode), 'special file')}, expected a regular file")
