# SPDX-License-Identifier: Apache-2.0
"""The progress of everything that takes long, on stderr: a bar on a terminal, now and then a line anywhere else."""

import contextlib
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 10  # between two lines where there is no terminal


@contextlib.contextmanager
def progress_bar(description, total, *, unit="count", show=True):
    """Yields advance(n): `with progress_bar("loading", 272) as advance: ... advance(1)`.

    total: what n adds up to, or None when it is not known. unit: "count" or "bytes". show: False for nothing at all.
    What takes less than SECONDS writes no line.
    """
    console = Console(stderr=True)
    if show and not console.is_terminal:
        yield _lines(console, description, total, unit)
        return
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not show,
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda n=1: progress.advance(task, n)


def _lines(console, description, total, unit):
    """advance(n) of a file or a pipe."""
    begin = last = time.monotonic()
    done = 0

    def advance(n=1):
        nonlocal last, done
        done += n
        now = time.monotonic()
        if now - last < SECONDS:
            return
        last = now
        parts = [f"{done / 2**20:.1f}" if unit == "bytes" else str(done)]
        if total:
            parts.append(f"of {total / 2**20:.1f}" if unit == "bytes" else f"of {total}")
        if unit == "bytes":
            parts.append("MiB")
        line = f"{description}: {' '.join(parts)}, {now - begin:.0f} s"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return advance
