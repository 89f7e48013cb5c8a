# SPDX-License-Identifier: Apache-2.0
"""bench/results: every file has the schema, says what the docs say, and keeps what is promised."""

import json
import math
import re
from pathlib import Path

import bench_scripts
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {
    str(path.relative_to(ROOT / "bench/results")): json.loads(path.read_text())
    for path in sorted((ROOT / "bench/results").rglob("*.json"))
}
BENCH = ("decode", "w4a16", "w8a16", "linear", "ops")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = {f: f"h200/{f}.json" for f in BENCH} | {f: f"xeon-2c/{f}.json" for f in ("demo", "ppl")}  # in the tables
TABLES = bench_scripts.load("tables")


def files(*families):
    """The results files of these families, of all without any."""
    return [name for name, result in RESULTS.items() if not families or result["family"] in families]


# ---------------------------------------------------------------- the schema


def is_number(x):
    return type(x) in (int, float) and math.isfinite(x)


@pytest.mark.parametrize("name", files())
def test_every_file_says_what_it_is_of(name):
    result = RESULTS[name]
    assert result["schema"] == 1 and result["family"] == Path(name).stem
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    machine = result["machine"]
    assert machine["torch"] and (machine.get("cpu") or (machine["gpu"] and machine["driver"] and machine["cuda"]))
    assert result["family"] in (*BENCH, "tests") or (result["seconds"] > 0 and result["run"])


@pytest.mark.parametrize("name", files(*BENCH))
def test_bench_files(name):
    result = RESULTS[name]
    assert result["harness"] and isinstance(result["missing"], list)
    assert set(result["ceiling"]) == {"read_gb_s", "copy_gb_s", "bf16_tflop_s"}
    assert all(mhz > 0 for mhz in result["machine"]["sm_clock_mhz"])
    rows = result["rows"]
    assert len({(r["case"], r["impl"], r["variant"]) for r in rows}) == len(rows) > 0
    for r in rows:
        assert {"case", "impl", "variant", "kernel", "l2"} <= {k for k, v in r.items() if v and isinstance(v, str)}, r
        numbers = ("us", "us_min", "us_max", "bytes", "flops", "gb_s", "tflop_s", "percent_of_roof", "rel_err")
        assert all(is_number(r[n]) and r[n] >= 0 for n in numbers), r
        assert 0 < r["us_min"] <= r["us"] <= r["us_max"] and r["l2"] in ("cold", "warm"), r
        assert r["gb_s"] == pytest.approx(r["bytes"] / r["us"] / 1e3, rel=0.02, abs=0.1), r
        roofs = r["gb_s"] / result["ceiling"]["read_gb_s"], r["tflop_s"] / result["ceiling"]["bf16_tflop_s"]
        assert r["percent_of_roof"] == pytest.approx(100 * max(roofs), rel=0.02, abs=0.1), r
        # More than the roof is a mistake of one of the two; but a short product meets a cooler chip than the long one
        # whose rate is the roof: an H200 does up to 795 TFLOP/s then, and 670 to 690 when it is hot.
        assert r["percent_of_roof"] <= (119 if roofs[1] > roofs[0] else 105), r
        assert not (r["impl"] == "rooftile" and r["kernel"].startswith("cpu")), r
    assert not {r["impl"] for r in rows} & set(result["missing"])


@pytest.mark.parametrize("name", files("demo"))
def test_demo_files(name):
    pytest.importorskip("transformers")
    from rooftile.demo.measure import wrong_kernels

    result = RESULTS[name]
    assert wrong_kernels(result) == []
    for row in result["rows"]:
        if not row["missing"]:
            assert row["decode_tok_s"] > 0 and row["prefill_tok_s"] > 0 and row["weight_bytes"] > 0, row["name"]
            assert (row["quality"] is None) == (row["format"] is None), row["name"]
    assert result["run"]["device"] and result["run"]["baseline"] in {row["name"] for row in result["rows"]}
    assert result["machine"] and result["commit"]


@pytest.mark.parametrize("name", files("ppl"))
def test_ppl_files(name):
    """Every figure of a row follows from its chunks."""
    baseline, *rows = RESULTS[name]["rows"]
    for row in (baseline, *rows):
        differences = [a - b for a, b in zip(row["nll_per_chunk"], baseline["nll_per_chunk"], strict=True)]
        n = len(differences)
        mean = sum(differences) / n
        error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
        assert row["perplexity"] == pytest.approx(math.exp(sum(row["nll_per_chunk"]) / n), rel=1e-9)
        assert row["dnll"] == pytest.approx(mean, abs=1e-9) and row["dnll_se"] == pytest.approx(error, abs=1e-9)
        assert row["vs_baseline_percent"] == pytest.approx(100 * math.expm1(mean), abs=1e-6)
        assert row["kl"] >= 0 and 0 < row["top1"] <= 1


# ---------------------------------------------------------------- the tables of README and docs


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tables_are_what_the_files_say(page):
    text = page.read_text()
    marked = set(re.findall(r"<!-- table: (\w+)", text))
    assert marked <= set(SHOWN)
    for family in marked:
        if SHOWN[family] not in RESULTS:  # not measured yet: the table's place is empty
            assert re.search(rf"<!-- table: {family} -->\n<!-- end of table -->", text), page
            continue
        written, count = TABLES.fill(text, RESULTS[SHOWN[family]])
        assert count > 0 and written == text, f"bench/tables.py bench/results/{SHOWN[family]} --into {page.name}"


def test_every_family_is_shown():
    assert set().union(*(re.findall(r"<!-- table: (\w+)", page.read_text()) for page in PAGES)) == set(SHOWN)
    readme = (ROOT / "README.md").read_text()
    assert all(f"<!-- table: {family}" in readme for family in ("decode", "w4a16", "demo", "ppl"))
    assert all(f"(bench/results/{SHOWN[family]})" in readme for family in ("demo", "ppl"))


# ---------------------------------------------------------------- what is promised


def ours(name, case, variant=None):
    rows = [r for r in RESULTS[name]["rows"] if (r["case"], r["impl"]) == (case, "rooftile")]
    return next(r for r in rows if variant in (None, r["variant"]))


@pytest.mark.parametrize(("format", "percent"), [("fp16", 70), ("int8", 55), ("int4-kivi", 40)])
def test_decode_near_the_roof(format, percent):
    assert ours("h200/decode.json", "b8_kv32768", format)["percent_of_roof"] >= percent


def test_w4a16_of_one_row():
    assert ours("h200/w4a16.json", "k4096_n14336_m1")["us"] <= 16


PROMISED = {
    "decode": r"b[18]_kv(1024|4096|32768)",
    "w4a16": r"k\d+_n\d+_m\d+",
    "w8a16": r"k\d+_n\d+_m\d+",
    "linear": r"k\d+_n\d+_m\d+",
    "ops": r".*",
}


@pytest.mark.parametrize("family", PROMISED)
def test_never_twice_as_slow_as_the_best_peer(family):
    rows = RESULTS[SHOWN[family]]["rows"]
    best = {}
    for r in rows:
        if r["impl"] != "rooftile":
            best[r["case"]] = min(best.get(r["case"], math.inf), r["us"])
    held = [r for r in rows if r["impl"] == "rooftile" and re.fullmatch(PROMISED[family], r["case"])]
    held = [r for r in held if not r["variant"].endswith("-invariant")]  # one order of sums has its price
    # groups of 32 with minima are not promised where arithmetic is the roof: docs/kernels/w4a16.md has what they take
    held = [r for r in held if not (r["variant"].endswith("-minima") and int(r["case"].rpartition("_m")[2]) > 64)]
    assert held and {r["case"] for r in held} <= set(best)
    slow = [(r["case"], r["variant"], r["us"], best[r["case"]]) for r in held if r["us"] > 2 * best[r["case"]]]
    assert slow == []


# What a cache format costs SmolLM2-135M, measured with plain PyTorch apart from rooftile: dNLL and its standard error,
# from docs/guide/models.md, the kivi formats with the visibility of docs/design/011-kivi-visibility.md.
PLAIN_PYTORCH = {
    "int8": (0.00048, 0.00046),
    "int4": (0.23375, 0.00792),
    "int4-kivi-sym": (0.01660, 0.00231),
    "int4-kivi": (0.00525, 0.00114),
}


@pytest.fixture
def quality():
    return {row["name"]: row for row in RESULTS[SHOWN["ppl"]]["rows"]}


def test_perplexity_of_the_baseline(quality):
    assert quality["baseline"]["perplexity"] == pytest.approx(21.79, abs=0.03)
    assert abs(quality["W4A16"]["dnll"]) <= 0.0005


@pytest.mark.parametrize("format", PLAIN_PYTORCH)
def test_what_a_format_costs(quality, format):
    dnll, error = PLAIN_PYTORCH[format]
    documented = re.findall(r"\+([\d.]+) ± ([\d.]+)", (ROOT / "docs/guide/models.md").read_text())
    assert (dnll, error) in {tuple(map(float, pair)) for pair in documented}
    for row in quality.values():
        if row["format"] == format:
            assert abs(row["dnll"] - dnll) <= 2 * error, row["name"]
    assert quality[format]["format"] == format


QWEN = "xeon-2c/qwen2.5-coder-1.5b/ppl.json"


def test_what_the_formats_cost_qwen():
    """The table of docs/guide/models.md says what the file says, as far as it is written out."""
    rows = {row["name"]: row for row in RESULTS[QWEN]["rows"]}
    page = (ROOT / "docs/guide/models.md").read_text()
    text = page[page.index("Models differ. Qwen2.5") : page.index(f"bench/results/{QWEN}")]
    assert f"baseline {rows['baseline']['perplexity']:.2f}," in text
    formats, written = re.findall(r"\| `([\w-]+)`", text), re.findall(r"([+-][\d.]+) ± ([\d.]+)", text)
    assert set(formats) == {row["format"] for row in rows.values()} - {None}
    for format, cell in zip(formats, written, strict=True):
        for value, key in zip(cell, ("dnll", "dnll_se"), strict=True):
            sign = "+" if key == "dnll" else ""
            assert f"{rows[format][key]:{sign}.{len(value.partition('.')[2])}f}" == value, (format, key)


def test_int8_and_fp8():
    """What docs/guide/cache-formats.md says of the two formats of one byte."""
    page = (ROOT / "docs/guide/cache-formats.md").read_text()
    for name, written in zip((SHOWN["ppl"], QWEN), re.findall(r"([\d.]+\d) against ([\d.]+\d)", page), strict=True):
        kl = {row["name"]: row["kl"] for row in RESULTS[name]["rows"]}
        for format, text in zip(("int8", "fp8"), written, strict=True):
            assert f"{kl[format]:.{len(text.partition('.')[2])}f}" == text, (name, format)


def test_speed_of_the_demo():
    rows = {row["name"]: row for row in RESULTS[SHOWN["demo"]]["rows"]}
    assert rows["bf16 cache"]["decode_speedup"] >= 0.95
    assert rows["W4A16 + int4-kivi"]["decode_speedup"] >= 1.3
