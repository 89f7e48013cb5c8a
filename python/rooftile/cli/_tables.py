# SPDX-License-Identifier: Apache-2.0
"""Tables on a terminal, in a pipe, in a file."""

from rich.console import Console
from rich.measure import Measurement


def print_whole(console, table):
    """Prints lines that a narrow terminal wraps, rather than figures that are cut."""
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(file=console.file, width=max(console.width, needed)).print(table)
