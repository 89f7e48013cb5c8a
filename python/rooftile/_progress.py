# SPDX-License-Identifier: Apache-2.0
"""The progress bar of everything that takes long: on stderr, and only when that is a terminal."""

import contextlib

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(description, total, *, unit="count", show=True):
    """Yields advance(n): `with progress_bar("loading", 272) as advance: ... advance(1)`.

    total: what n adds up to, or None when it is not known. unit: "count" or "bytes". show: False for no bar at all.
    """
    console = Console(stderr=True)
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda n=1: progress.advance(task, n)
