# SPDX-License-Identifier: Apache-2.0
"""rooftile bench without a GPU: names of cases, the results file, its tables. What it measures needs a GPU."""

import io
import json
import re
import sys
import types

import bench_scripts
import pytest
import rooftile as rt
import torch
from rich.console import Console
from rooftile import _results
from rooftile.bench import decode, linear, ops, products, report, timing, vllm_products, w4a16, w8a16
from rooftile.cli import main
from rooftile.cli._tables import print_whole
from rooftile.kv_cache import KIVI

FAMILIES = {"decode": decode, "w4a16": w4a16, "w8a16": w8a16, "linear": linear, "ops": ops}
CEILING = {"read_gb_s": 4000.0, "copy_gb_s": 3600.0, "bf16_tflop_s": 700.0}
FACTS = {"gpu": "A GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.13.0"}
TABLES = bench_scripts.load("tables")


# ---------------------------------------------------------------- names of cases


@pytest.mark.parametrize(("family", "case"), [(f, c) for f, module in FAMILIES.items() for c in module.CASES])
def test_every_listed_case_parses(family, case):
    assert FAMILIES[family].parse(case)


def test_cases_are_listed_once():
    for module in FAMILIES.values():
        assert len(set(module.CASES)) == len(module.CASES) <= module.steps(module.CASES)


PLAIN = {"b": 8, "kv": 4096, "hq": 32, "hkv": 8, "d": 128, "t": 1, "paged": 0, "w": 0}
PLAIN |= dict.fromkeys(("ragged", "append", "shared"), False)
RAGGED = [f"ragged{n}{options}" for n in (1, 64) for options in ("", "_paged64", "_t4_w1024", "_hq9_hkv3_d64")]


@pytest.mark.parametrize(
    ("family", "case", "means"),
    [
        ("decode", "b8_kv4096", PLAIN),
        ("decode", "b1_kv131072", PLAIN | {"b": 1, "kv": 131072}),
        ("decode", "b8_kv4096_t4", PLAIN | {"t": 4}),
        ("decode", "b8_kv4096_paged16", PLAIN | {"paged": 16}),
        ("decode", "b8_kv4096_t4_paged16_shared", PLAIN | {"t": 4, "paged": 16, "shared": True}),
        ("decode", "b8_kv4096_hq9_hkv3_d64", PLAIN | {"hq": 9, "hkv": 3, "d": 64}),
        ("decode", "b8_kv4096_d64_t2_hkv3_hq9", PLAIN | {"hq": 9, "hkv": 3, "d": 64, "t": 2}),
        ("decode", "b64_kv32768", PLAIN | {"b": 64, "kv": 32768}),
        ("decode", "b8_kv4096_hq32_hkv1_d128", PLAIN | {"hkv": 1}),
        ("decode", "b8_kv4096_hq16_hkv8_d256_w1024", PLAIN | {"hq": 16, "d": 256, "w": 1024}),
        ("decode", "append_b64_t1", PLAIN | {"b": 64, "append": True}),
        ("decode", "append_b8_hkv3_d64_t1", PLAIN | {"b": 8, "hkv": 3, "d": 64, "append": True}),
        ("w4a16", "k4096_n14336_m1", (4096, 14336, 1)),
        ("w4a16", "k14336_n4096_m256", (14336, 4096, 256)),
        ("w4a16", "k4096_n128256_m16", (4096, 128256, 16)),
        ("w8a16", "k4096_n14336_m1024", (4096, 14336, 1024)),
        ("linear", "k14336_n4096_m4096", (14336, 4096, 4096)),
        ("ops", "rms_norm_t64_h4096", ("rms_norm", 64, 4096)),
        ("ops", "add_rms_norm_t1_h576", ("add_rms_norm", 1, 576)),
        ("ops", "merge_attention_t16384_h4096", ("merge_attention", 16384, 4096)),
    ],
)
def test_what_a_case_means(family, case, means):
    assert FAMILIES[family].parse(case) == means


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("decode", ""),
        ("decode", "b8"),
        ("decode", "kv4096_b8"),
        ("decode", "b8_kv4096_"),
        ("decode", "b8_kv4096_x3"),
        ("decode", "b-8_kv4096"),
        ("decode", "b8_kv4096 "),
        ("decode", "b0_kv4096"),
        ("decode", "b8_kv4096_w0"),
        ("decode", "ragged"),
        ("decode", "ragged64_kv4096"),
        ("decode", "b8_kv4096_shared"),  # pages are what rows share
        ("decode", "ragged64_paged64_shared"),
        ("decode", "append"),
        ("decode", "append_b64_t4"),  # one token at a time into a contiguous cache is what is timed
        ("decode", "append_b64_paged16"),
        ("decode", "append_b64_hq9"),
        ("w4a16", "k4096_n14336"),
        ("w4a16", "n14336_k4096_m1"),
        ("w8a16", "k4096_n14336_m"),
        ("linear", "k4096_n14336"),
        ("w4a16", "k4096_n14336_m1_g32"),
        ("ops", "rms_norm"),
        ("ops", "tanh_t1_h4096"),
        ("ops", "xrms_norm_t1_h4096"),
        ("ops", "rms_norm_t1_h4096_"),
    ],
)
def test_names_that_are_no_case(family, case):
    with pytest.raises(rt.ArgumentError, match=f"bench {family}: .* is no case; they look like "):
        FAMILIES[family].parse(case)


def test_the_command_without_a_gpu(capsys, tmp_path):
    assert main(["bench", "decode", "--list", "--only", "paged"]) == 0
    assert capsys.readouterr().out.split() == ["b8_kv4096_paged16", "b8_kv4096_paged64", "b64_kv4096_paged64_shared"]
    for arguments, words in (
        (["w4a16", "--only", "nothing"], "--only: no case of w4a16 holds nothing"),
        (["w4a16", "--case", "k4096"], "is no case"),
        (["ops", "--json", str(tmp_path / "no" / "where.json")], "--json"),
    ):
        assert main(["bench", *arguments]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("case", RAGGED)
def test_rows_of_a_ragged_batch(case):
    shape = decode.parse(case)
    tokens = decode.lengths(shape)
    assert len(tokens) == shape["b"] and shape["kv"] == max(tokens) and tokens == decode.lengths(decode.parse(case))
    assert all(128 <= n <= 32768 for n in tokens)
    if shape["b"] == 64:  # as many between 128 and 2048 as between 2048 and 32768, where they would all be otherwise
        assert len(set(tokens)) > 60 and 24 <= sum(n < 2048 for n in tokens) <= 40


@pytest.fixture
def bench_on_cpu(monkeypatch):
    """The cases run on the CPU, and what is timed is called once."""

    def time_calls(calls, at_least=1):
        for call in calls:
            call()
        return 1.0, 1.0, 1.0

    for name, value in {
        "_DEVICE": "cpu",
        "_too_large": lambda _: None,
        "copies_for": lambda _: 2,
        "time_calls": time_calls,
    }.items():
        monkeypatch.setattr(decode, name, value)


@pytest.mark.parametrize(
    ("case", "read", "seen"),
    [
        ("ragged3_hq4_hkv2_d32", None, None),
        ("b2_kv300_hq4_hkv2_d32", 600, 600),
        ("b2_kv300_hq4_hkv2_d32_paged16", 608, 600),  # whole pages
        ("b2_kv300_hq4_hkv2_d32_paged64_shared", 384, 600),  # four pages of both, one of each
        ("b2_kv300_hq4_hkv2_d32_w100", 200, 200),
        ("b2_kv300_hq4_hkv2_d32_t3_w100", 204, 204),
        ("b2_kv90_hq4_hkv1_d32_t2_w100", 180, 180),
        ("b2_kv300_hq4_hkv4_d32_t2", 600, 600),
    ],
)
def test_a_case_of_decode(case, read, seen, bench_on_cpu, capsys):
    """Every format passes its check, the peers agree, and what is read and computed is that of the tokens seen."""
    shape, calls = decode.parse(case), []
    if read is None:
        read = seen = sum(decode.lengths(shape))
    rows, _ = decode.run([case], True, CEILING, lambda: calls.append(1))
    ours = {r["variant"]: r for r in rows if r["impl"] == "rooftile"}
    assert len(calls) == decode.steps([case]) == len(decode.FORMATS)
    assert set(ours) == set(decode.FORMATS) - (set(KIVI) if shape["paged"] == 16 else set())
    assert ours["fp16"]["bytes"] == 4 * read * shape["hkv"] * shape["d"]
    assert {r["flops"] for r in rows} == {4 * seen * shape["t"] * shape["hq"] * shape["d"]}
    eager = [r for r in rows if r["impl"] == "torch.eager"]
    assert len(eager) == (not shape["ragged"] and not shape["paged"])
    assert "torch.eager" not in capsys.readouterr().err
    assert all(r["bytes"] == ours["fp16"]["bytes"] for r in eager)


@pytest.mark.parametrize("peers", [True, False])
def test_a_case_of_linear(peers, monkeypatch):
    """Both types pass their check, the peer agrees, and what is read and computed is the weight, x and y."""
    timed, advanced = [], []

    def time_calls(calls):
        timed.append([call() for call in calls])
        return 1.0, 1.0, 1.0

    for name, value in {"_DEVICE": "cpu", "copies_for": lambda _: 2, "time_calls": time_calls}.items():
        monkeypatch.setattr(linear, name, value)
    rows, missing = linear.run(["k64_n48_m3", "k96_n8_m1"], peers, CEILING, lambda: advanced.append(1))
    impls = ["rooftile", "cublas"] if peers else ["rooftile"]
    assert [(r["case"], r["variant"], r["impl"]) for r in rows] == [
        (case, variant, impl) for case in ("k64_n48_m3", "k96_n8_m1") for variant in ("fp16", "bf16") for impl in impls
    ]
    assert missing == set() and len(advanced) == linear.steps(["a", "b"])
    assert {r["bytes"] for r in rows if r["case"] == "k64_n48_m3"} == {2 * (64 * 48 + 3 * (64 + 48))}
    assert {r["flops"] for r in rows} == {2 * 3 * 64 * 48, 2 * 96 * 8}
    assert all(len(results) == 2 and torch.equal(*results) for results in timed)
    monkeypatch.setattr(rt, "linear", lambda x, weight, out=None: x @ weight.T + 0.1)
    with pytest.raises(RuntimeError, match=r"^k64_n48_m3 fp16 rooftile: wrong answer, relative error .*not timed"):
        linear.run(["k64_n48_m3"], peers, CEILING, lambda: None)


@pytest.mark.parametrize("peers", [True, False])
def test_a_case_of_w8a16(peers, monkeypatch):
    """Ours passes its check, the peer agrees, and what is read is the codes, scales, x and y."""
    timed, advanced = [], []

    def time_calls(calls):
        timed.append([call() for call in calls])
        return 1.0, 1.0, 1.0

    monkeypatch.setattr(w8a16, "_DEVICE", "cpu")
    monkeypatch.setattr(products, "copies_for", lambda _: 2)
    monkeypatch.setattr(products, "time_calls", time_calls)
    rows, missing = w8a16.run(["k128_n64_m3", "k256_n16_m1"], peers, CEILING, lambda: advanced.append(1))
    impls = [("rooftile", "int8-g128"), ("cublas", "fp16")] if peers else [("rooftile", "int8-g128")]
    assert [(r["case"], r["impl"], r["variant"]) for r in rows] == [
        (case, *impl) for case in ("k128_n64_m3", "k256_n16_m1") for impl in impls
    ]
    assert missing == set() and len(advanced) == w8a16.steps(["a", "b"])
    read = [128 * 64 + 2 * 64 + 2 * 3 * (64 + 128), 256 * 16 + 2 * 2 * 16 + 2 * (16 + 256)]
    assert [r["bytes"] for r in rows if r["impl"] == "rooftile"] == read
    assert {r["flops"] for r in rows} == {2 * 3 * 64 * 128, 2 * 256 * 16}
    assert all(len(results) == 2 and torch.equal(*results) for results in timed)
    monkeypatch.setattr(rt, "w8a16_matmul", lambda x, w, out=None: x @ w.dequantize("float16").T + 0.1)
    with pytest.raises(
        RuntimeError, match=r"^k128_n64_m3 rooftile int8-g128: wrong answer, relative error .*not timed"
    ):
        w8a16.run(["k128_n64_m3"], peers, CEILING, lambda: None)


def test_formats_are_what_the_library_has(monkeypatch, bench_on_cpu, capsys):
    """Asked by a call: what refuses has no row and is named once, whether it cannot be attended or not even stored."""
    decode_attention, append = rt.decode_attention, rt.KVCache.append

    def attend(q, cache, **options):
        if cache.format == "int4":
            raise rt.NotSupportedError("decode_attention: no kernel for int4")
        return decode_attention(q, cache, **options)

    def store(cache, *arguments, **options):
        if cache.format == "fp8":
            raise rt.NotSupportedError("append: no kernel for fp8")
        append(cache, *arguments, **options)

    monkeypatch.setattr(rt, "decode_attention", attend)
    monkeypatch.setattr(rt.KVCache, "append", store)
    cases = ["b1_kv40_hq2_hkv1_d16", "b2_kv40_hq2_hkv1_d16", "append_b2_hkv1_d16_t1"]
    rows, _ = decode.run(cases, False, CEILING, lambda: None)
    variants = {case: {r["variant"] for r in rows if r["case"] == case} for case in cases}
    assert variants[cases[0]] == variants[cases[1]] == set(decode.FORMATS) - {"int4", "fp8"}
    assert variants[cases[2]] == set(decode.FORMATS) - {"fp8"}
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [
        "fp8 with head_dim 16 is left out: append: no kernel for fp8",
        "int4 with head_dim 16 is left out: decode_attention: no kernel for int4",
    ]


def test_a_case_that_memory_is_too_small_for(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(decode, "_DEVICE", "cpu")
    calls = []
    assert decode.run(["b64_kv32768"], True, CEILING, lambda: calls.append(1))[0] == []
    assert capsys.readouterr().err == "b64_kv32768 is left out: it needs 24.0 GiB, 1.0 are free\n"
    assert len(calls) == len(decode.FORMATS)


def test_a_peer_without_a_row_is_missing(monkeypatch, bench_on_cpu):
    """Whether it is installed or not: what was not measured is not there."""
    rows = [{"impl": "torch.eager"}]
    monkeypatch.setattr(decode, "_ours", lambda *_: {"impl": "rooftile"})
    monkeypatch.setattr(decode, "_peers", lambda *_: rows)
    run = lambda module, peers: module.run(module.CASES[:1], peers, CEILING, lambda: None)[1]  # noqa: E731
    assert run(decode, True) == {"flashinfer"} and run(decode, False) == set()
    rows.append({"impl": "flashinfer"})
    assert run(decode, True) == set()

    class Weights:
        def __init__(self, k, n, peers):
            pass

        def rows(self, *_):
            return rows

    monkeypatch.setattr(w4a16, "_Weights", Weights)
    assert run(w4a16, True) == {"marlin", "machete"} and run(w4a16, False) == set()


@pytest.mark.parametrize("bits, zeros", [(4, None), (4, "minima"), (8, None)])
def test_copies_of_a_weight_share_no_memory(bits, zeros, monkeypatch):
    monkeypatch.setattr(products, "copies_for", lambda _: 3)
    weight_type = {4: rt.W4Weight, 8: rt.W8Weight}[bits]
    w = weight_type.quantize(torch.randn(32, 128, dtype=torch.float16), group_size=32, zeros=zeros)
    copies, exact = products.packed_copies(w)
    places = [a.data_ptr() for c in copies for a in (c.codes, c.scales, c.offsets) if a is not None]
    assert len(set(places)) == len(places) == (9 if zeros else 6)
    assert all(torch.equal(c.dequantize("float32"), exact) for c in copies)


def test_a_peer_that_is_left_out_is_named(monkeypatch, capsys):
    """It refuses the shape, as cuDNN does on a CPU, or errs; the others are timed."""
    shape = decode.parse("b1_kv64_hq2_hkv1_d16")
    monkeypatch.setattr(decode, "_tensors", lambda _: (torch.ones(1, 1, 2, 16), *torch.randn(2, 1, 64, 1, 16)))
    monkeypatch.setattr(decode, "_DTYPE", torch.float32)
    monkeypatch.setattr(decode, "copies_for", lambda _: 1)
    monkeypatch.setattr(decode, "time_calls", lambda _: (1.0, 1.0, 1.0))
    assert "torch.eager" in {r["impl"] for r in decode._peers("a", shape, CEILING)}
    assert re.search(r"^a torch\.sdpa\.cudnn is left out: \S", capsys.readouterr().err, re.MULTILINE)
    monkeypatch.setattr(decode, "exact", lambda *_: torch.ones(1, 1, 2, 16))
    assert decode._peers("a", shape, CEILING) == []
    assert "a torch.eager is left out: checked: wrong answer, relative error" in capsys.readouterr().err


def test_copies_that_the_l2_cannot_hold(monkeypatch):
    mib = 2**20
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=50 * mib))
    sizes = (1, mib, 60 * mib, 100 * mib, 1500 * mib, 1501 * mib)
    assert [timing.copies_for(n) for n in sizes] == [256, 151, 3, 2, 2, 1]


# ---------------------------------------------------------------- the results file


@pytest.mark.parametrize(
    ("printed", "driver", "clock"),
    [("580.1, 1980", "580.1", 1980), ("580.1, [N/A]", "580.1", None), ("", "unknown", None), (None, "unknown", None)],
)
def test_driver_and_clock_of_the_gpu_that_torch_uses(monkeypatch, printed, driver, clock):
    """Its UUID is asked for: number 0 of nvidia-smi may be another one."""
    asked = []
    monkeypatch.setattr(_results, "output", lambda *command: (asked.append(command), printed)[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab-12"))
    facts = _results.machine("cuda:1")
    assert (facts["driver"], facts["sm_clock_mhz"]) == (driver, clock) and asked[0][-2:] == ("-i", "GPU-ab-12")


def test_clocks_that_nobody_knows():
    facts = FACTS | {"sm_clock_mhz": None}
    result = report.report("decode", [], CEILING, (), (facts, facts), "abc1234")
    assert result["machine"]["sm_clock_mhz"] == [] and "MHz" not in TABLES.caption(result)


def measured(family="decode", missing=("flashinfer",)):
    """A made-up result: two cases, two formats, two peers; the second case lacks one of the formats."""
    nbytes, flops = 40_000_000, 160_000_000

    def row(case, impl, variant, us):
        return report.row(case, impl, variant, f"kernel_{variant}", (us, us - 1, us + 2), nbytes, flops, 1e-4, CEILING)

    rows = [
        row("a", "rooftile", "fp16", 12.5),
        row("a", "rooftile", "int8", 10.0),
        row("a", "torch.eager", "fp16", 50.0),
        row("a", "torch.sdpa", "fp16", 25.0),
        row("b", "rooftile", "fp16", 200.0),
        row("b", "torch.eager", "fp16", 100.0),
    ]
    before, after = FACTS | {"sm_clock_mhz": 345}, FACTS | {"sm_clock_mhz": 1980}
    return report.report(family, rows, CEILING, set(missing), (before, after), "abc1234")


def test_a_row_is_held_against_the_nearer_roof():
    streams = report.row("a", "rooftile", "fp16", "k", (10.0, 9.5, 12.25), 20_000_000, 10**9, 1.234e-4, CEILING)
    assert streams["gb_s"] == 2000.0 and streams["tflop_s"] == 100.0
    assert streams["percent_of_roof"] == 50.0  # 2000 of 4000 GB/s; 100 of 700 TFLOP/s is less
    assert (streams["us"], streams["us_min"], streams["us_max"]) == (10.0, 9.5, 12.25)
    assert streams["rel_err"] == 1.2e-4 and streams["l2"] == "cold"
    computes = report.row("a", "rooftile", "fp16", "k", (10.0, 9.5, 12.0), 2_000_000, 35 * 10**8, 0.0, CEILING)
    assert computes["percent_of_roof"] == 50.0  # 350 of 700 TFLOP/s


def test_a_report_is_plain_json():
    result = measured()
    assert json.loads(json.dumps(result)) == result
    assert result["schema"] == 1 and result["family"] == "decode" and result["commit"] == "abc1234"
    assert result["machine"] == FACTS | {"sm_clock_mhz": [345, 1980]}
    assert result["missing"] == ["flashinfer"] and result["harness"] == timing.harness()


def test_the_table_on_the_terminal():
    out = io.StringIO()
    Console(file=out, width=200).print(report.table(measured()))
    text = out.getvalue()
    assert "decode on A GPU: reads at most 4000 GB/s, bf16 700 TFLOP/s" in text and "flashinfer" in text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "rooftile" in line]
    assert lines == [
        ["a", "rooftile", "fp16", "12.5", "3200", "13", "80.0", "2.00"],
        ["a", "rooftile", "int8", "10.0", "4000", "16", "100.0", "2.50"],
        ["b", "rooftile", "fp16", "200.0", "200", "1", "5.0", "0.50"],
    ]


def test_the_table_is_whole_where_nobody_watches(capsys):
    print_whole(Console(width=40), report.table(measured()))
    text = capsys.readouterr().out
    assert "…" not in text and "┃ x best peer ┃" in text


# ---------------------------------------------------------------- bench/tables.py


def test_the_markdown_table():
    lines = TABLES.table(measured()).splitlines()
    assert lines[:5] == [
        "| case | fp16 | int8 | best peer | peer / ours |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| a | 12.5 (80 %) | 10.0 (100 %) | 25.0 torch.sdpa | 2.00 / 2.50 |",
        "| b | 200 (5 %) |  | 100 torch.eager | 0.50 |",
        "",
    ]
    for fact in ("A GPU", "345-1980 MHz", "4000 GB/s", "700 TFLOP/s", "flashinfer", "abc1234", timing.harness()):
        assert fact in lines[5], fact


def test_a_table_without_peers_and_of_some_cases():
    result = measured(missing=())
    result["rows"] = [r for r in result["rows"] if r["impl"] == "rooftile"]
    assert TABLES.table(result, ["b"]).splitlines()[:3] == ["| case | fp16 |", "| --- | ---: |", "| b | 200 (5 %) |"]
    assert "not measured" not in TABLES.caption(result)
    with pytest.raises(ValueError, match="no case of decode matches c"):
        TABLES.table(result, ["c"])


def test_a_table_of_some_variants():
    assert TABLES.table(measured(), ["variant=int?"]).splitlines()[:4] == [
        "| case | int8 | best peer | peer / ours |",
        "| --- | ---: | ---: | ---: |",
        "| a | 10.0 (100 %) | 25.0 torch.sdpa | 2.50 |",
        "",
    ]
    both = TABLES.table(measured(), ["a", "b", "variant=fp16", "variant=int8"])
    assert both == TABLES.table(measured(), ["?"]) == TABLES.table(measured())
    with pytest.raises(ValueError, match="no case of decode matches b or variant=int8"):
        TABLES.table(measured(), ["b", "variant=int8"])


def test_tables_are_written_between_their_markers(tmp_path, capsys):
    results, page = tmp_path / "decode.json", tmp_path / "page.md"
    results.write_text(json.dumps(measured()))
    page.write_text(
        "before\n<!-- table: decode -->\nold\n<!-- end of table -->\nbetween\n<!-- table: decode b* x -->\n"
        "<!-- end of table -->\n<!-- table: w4a16 -->\n<!-- end of table -->\nafter\n"
    )
    assert TABLES.main([str(results), "--into", str(page)]) == 0
    once = page.read_text()
    assert TABLES.main([str(results), "--into", str(page)]) == 0
    assert page.read_text() == once and "old" not in once  # and again changes nothing
    assert once.count("| a |") == 1 and once.count("| b |") == 2
    assert (
        once.startswith("before\n<!-- table: decode -->\n| case |") and "between\n<!-- table: decode b* x -->\n" in once
    )
    assert once.endswith("<!-- table: w4a16 -->\n<!-- end of table -->\nafter\n")
    capsys.readouterr()
    assert TABLES.main([str(results), "a"]) == 0
    assert capsys.readouterr().out == TABLES.table(measured(), ["a"])


@pytest.mark.parametrize(
    ("text", "extra", "words"),
    [
        ("no marker", None, "no `<!-- table: decode -->`"),
        ("<!-- table: decode -->\nnever ends", None, "no `<!-- table: decode -->`"),
        ("<!-- table: decode -->\n<!-- table: ops -->\n<!-- end of table -->\n", None, "no `<!-- table: decode -->`"),
        ("", {"schema": 2}, "schema 2, this script reads 1"),
    ],
)
def test_tables_refuse(tmp_path, capsys, text, extra, words):
    results, page = tmp_path / "decode.json", tmp_path / "page.md"
    results.write_text(json.dumps(measured() | (extra or {})))
    page.write_text(text)
    with pytest.raises(SystemExit):
        TABLES.main([str(results), "--into", str(page)])
    assert words in capsys.readouterr().err and page.read_text() == text


# ---------------------------------------------------------------- vLLM's products


class PretendedVllm:
    """The functions that are called, with vLLM's signatures, over plain arrays."""

    kind, empty = object(), torch.empty(0, dtype=torch.int32)

    def gptq_marlin_repack(self, b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
        assert b_q_weight.dtype == torch.int32 and b_q_weight.is_contiguous() and perm is self.empty
        assert b_q_weight.shape == (size_k // 8, size_n) and num_bits == 4 and not is_a_8bit
        return b_q_weight.clone()

    def marlin_make_empty_g_idx(self, device):
        return self.empty

    def marlin_make_workspace_new(self, device, max_blocks_per_sm=1):
        return torch.zeros(4, dtype=torch.int32)

    def marlin_permute_scales(self, s, size_k, size_n, group_size, is_a_8bit=False):
        assert s.shape == (size_k // group_size, size_n)
        return s.clone()

    def product(self, x, qweight, scales):
        nibbles = torch.stack([qweight >> 4 * i & 15 for i in range(8)], 1)  # [K / 8, 8, N]
        values = nibbles.reshape(-1, qweight.shape[1]).double() - 8
        return (x.double() @ (values * scales.double().repeat_interleave(len(values) // len(scales), 0))).half()

    def apply_gptq_marlin_linear(
        self,
        input,
        weight,
        weight_scale,
        weight_zp,
        g_idx,
        g_idx_sort_indices,
        workspace,
        wtype,
        output_size_per_partition,
        input_size_per_partition,
        is_k_full,
        input_global_scale=None,
        bias=None,
        use_fp32_reduce=True,
        input_dtype=None,
    ):
        assert weight_zp is g_idx is g_idx_sort_indices is self.empty and wtype is self.kind and is_k_full is True
        assert workspace.dtype == torch.int32 and input.shape[1] == input_size_per_partition
        assert weight.shape[1] == output_size_per_partition
        return self.product(input, weight, weight_scale)

    def machete_prepack_B(self, b_q_weight, a_type, b_type, group_scales_type):
        assert b_q_weight.stride() == (1, b_q_weight.shape[0]) and b_type is self.kind
        assert a_type == group_scales_type == torch.float16
        return b_q_weight.contiguous()

    def machete_mm(
        self,
        a,
        b_q,
        b_type,
        out_type=None,
        b_group_scales=None,
        b_group_zeros=None,
        b_group_size=None,
        b_channel_scales=None,
        a_token_scales=None,
        schedule=None,
    ):
        assert b_type is self.kind and b_group_zeros is None
        assert b_q.shape[0] * 8 == b_group_scales.shape[0] * b_group_size
        return self.product(a, b_q, b_group_scales)


def test_vllm_is_given_the_weight_it_expects(monkeypatch):
    w = rt.W4Weight.quantize(torch.randn(24, 256).half(), group_size=128)
    codes, scales, _ = w.unpack()
    assert vllm_products.products(codes, scales, 128) == {}  # not installed here
    vllm = PretendedVllm()
    utils = "vllm.model_executor.layers.quantization.utils"
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", utils.rpartition(".")[0], utils):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("vllm._custom_ops", f"{utils}.marlin_utils"):
        monkeypatch.setitem(sys.modules, name, vllm)
        monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], vllm, raising=False)
    scalar_type = types.ModuleType("vllm.scalar_type")
    scalar_type.scalar_types = types.SimpleNamespace(uint4b8=vllm.kind)
    monkeypatch.setitem(sys.modules, "vllm.scalar_type", scalar_type)
    x = torch.randn(3, 256).half()
    expected = x.double() @ w.dequantize("float32").double().T
    found = vllm_products.products(codes, scales, 128)
    assert list(found) == ["marlin", "machete"]
    for pack, call in found.values():
        assert torch.equal(call(x, pack()), expected.half())
