# SPDX-License-Identifier: Apache-2.0
"""What the README shows runs as it stands."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_block_runs():
    block = re.search(r"```python\n(.*?)```", README, re.S)[1]
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (1, 32, 128) and names["y"].shape == (1, 4096)
    assert names["y"].dtype == torch.bfloat16 and names["y"].isfinite().all()
    smaller = float(re.search(r"# ([\d.]+)x smaller than bf16", block)[1])
    k, v, cache = names["k"], names["v"], names["cache"]
    assert abs((k.nbytes + v.nbytes) / cache.nbytes_used - smaller) <= 0.05


def test_two_commands():
    section = README.partition("## Two commands")[2].partition("\n## ")[0]
    commands = re.search(r"```\n(.*?)```", section, re.S)[1]
    assert re.findall(r"^(\S+ \S+)", commands, re.M) == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"demo", "test"} <= set(targets)
