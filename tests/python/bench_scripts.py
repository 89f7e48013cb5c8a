# SPDX-License-Identifier: Apache-2.0
"""The scripts of bench/ as modules."""

import importlib.util
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def load(name):
    """bench/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
