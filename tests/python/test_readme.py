# SPDX-License-Identifier: Apache-2.0
"""What the README shows runs as it stands."""

import json
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


def results(name):
    return json.loads((ROOT / "bench/results" / name).read_text())["rows"]


def test_the_numbers_it_begins_with_are_those_of_the_results():
    section = README.partition("## In four numbers")[2].partition("\n## ")[0]
    (cache,) = (r for r in results("cpu-2c/ppl.json") if (r["format"], r["weights"]) == ("int4-kivi", "dequantize"))
    (model,) = (r for r in results("cpu-2c/demo.json") if (r["format"], r["weights"]) == ("int4-kivi", "w4a16"))
    (shown,) = set(re.findall(r"<!-- table: (\S+/w4a16) ", README))
    of_case = [r for r in results(f"{shown}.json") if r["case"] == "k4096_n14336_m1" and r["l2"] == "cold"]
    (ours,) = (r for r in of_case if r["variant"] == "int4-g128" and r["impl"] == "rooftile")
    assert ours["peer"] == "marlin"
    for said, measured in (
        (r"by ([\d.]+) % \(\[every format\]", cache["vs_baseline_percent"]),
        (r"write ([\d.]+) times as many", model["decode_speedup"]),
        (r"takes ([\d.]+) of the time that Marlin takes", 1 / ours["peer_ratio"]),
    ):
        assert f"{float(re.search(said, section)[1]):.2f}" == f"{measured:.2f}"
