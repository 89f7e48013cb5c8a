# SPDX-License-Identifier: Apache-2.0
"""rooftile bench without a GPU: names of cases, the results file, its tables. What it measures needs a GPU."""

import contextlib
import importlib.machinery
import io
import json
import pathlib
import re
import sys
import types

import bench_scripts
import pytest
import rooftile as rt
import tiny_gguf
import torch
import transformers
from rich.console import Console
from rooftile import _results
from rooftile.bench import (
    attention_peers,
    cpu,
    decode,
    e2e,
    layer,
    linear,
    ops,
    products,
    report,
    runner,
    timing,
    vllm_products,
    w4a16,
    w8a16,
)
from rooftile.cli import main
from rooftile.cli._tables import print_whole
from rooftile.kv_cache import KIVI

FAMILIES = {"decode": decode, "w4a16": w4a16, "w8a16": w8a16, "linear": linear, "ops": ops}
CEILING = {
    "read_gb_s": 4000.0,
    "copy_gb_s": 3600.0,
    "bf16_burst_tflop_s": 700.0,
    "bf16_sustained_tflop_s": 600.0,
    "sustained_sm_clock_mhz": 1400,
    "sustained_power_w": 690,
}
FACTS = {"gpu": "A GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.13.0"}
TABLES = bench_scripts.load("tables")


# ---------------------------------------------------------------- names of cases


@pytest.mark.parametrize(("family", "case"), [(f, c) for f, module in FAMILIES.items() for c in module.CASES])
def test_every_listed_case_parses(family, case):
    assert FAMILIES[family].parse(case)


def test_cases_are_listed_once():
    for module in FAMILIES.values():
        assert len(set(module.CASES)) == len(module.CASES)


PLAIN = {"b": 8, "kv": 4096, "hq": 32, "hkv": 8, "d": 128, "t": 1, "paged": 0, "w": 0}
PLAIN |= dict.fromkeys(("ragged", "append", "shared"), False) | {"dtype": torch.float16}
RAGGED = [f"ragged{n}{options}" for n in (1, 64) for options in ("", "_paged64", "_t4_w1024", "_hq9_hkv3_d64")]


@pytest.mark.parametrize(
    ("family", "case", "means"),
    [
        ("decode", "b8_kv4096", PLAIN),
        ("decode", "b1_kv131072", PLAIN | {"b": 1, "kv": 131072}),
        ("decode", "b8_kv4096_t4", PLAIN | {"t": 4}),
        ("decode", "b8_kv4096_t4_bf16", PLAIN | {"t": 4, "dtype": torch.bfloat16}),
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


class PretendedTimer:
    """Calls every call once and says what `us` says of the number of replays so far."""

    def __init__(self, us=lambda replay: 10.0):
        self.us, self.replays, self.captured = us, 0, []

    def capture(self, calls, repeats):
        results = [call() for call in calls]
        self.captured.append((results, repeats))
        return len(self.captured) - 1

    def replay(self, graph):
        self.replays += 1
        return self.us(self.replays)

    def under_load(self, graph, us):
        return 1755, 420


@pytest.fixture
def bench_on_cpu(monkeypatch):
    """The cases run on the CPU, two copies of every input."""
    for module in (decode, linear, w4a16, w8a16, ops):
        monkeypatch.setattr(module, "_DEVICE", "cpu")
    for module in (decode, attention_peers, products, ops):
        monkeypatch.setattr(module, "rotation", lambda _: (2, "cold"))
    monkeypatch.setattr(decode, "_too_large", lambda _: None)
    monkeypatch.setattr(decode, "_LONGEST", 700)


def measure(family, cases, peers=(), timer=None, **options):
    """(rows, notes) of cases on the CPU."""
    notes, rows = runner.Notes(), []
    for found in runner.run(family, cases, peers, CEILING, timer or PretendedTimer(), notes, **options):
        rows += found
    return rows, notes


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
        ("b2_kv300_hq4_hkv2_d32_bf16", 600, 600),
    ],
)
def test_a_case_of_decode(case, read, seen, bench_on_cpu):
    """Every format passes its check, the peers agree, and what is read and computed is that of the tokens seen."""
    shape, calls = decode.parse(case), []
    if read is None:
        read = seen = sum(decode.lengths(shape))
    rows, notes = measure(decode, [case], ["torch.eager"], advance=lambda: calls.append(1))
    ours = {r["variant"]: r for r in rows if r["impl"] == "rooftile"}
    assert len(calls) == 1 and not any(note["failed"] for note in notes.left_out)
    assert set(ours) == set(decode.FORMATS[decode.dtype_name(shape)]) - (set(KIVI) if shape["paged"] == 16 else set())
    own = ours["bf16" if case.endswith("_bf16") else "fp16"]
    assert own["bytes"] == 4 * read * shape["hkv"] * shape["d"]
    assert {r["flops"] for r in rows} == {4 * seen * shape["t"] * shape["hq"] * shape["d"]}
    eager = [r for r in rows if r["impl"] == "torch.eager"]
    assert len(eager) == (not shape["ragged"] and not shape["paged"])
    assert all((r["variant"], r["bytes"]) == (own["variant"], own["bytes"]) for r in eager)


@pytest.mark.parametrize("peers", [("cublas",), ()])
def test_a_case_of_linear(peers, monkeypatch, bench_on_cpu):
    """Both types pass their check, the peer agrees, and what is read and computed is the weight, x and y."""
    timer = PretendedTimer()
    rows, notes = measure(linear, ["k64_n48_m3", "k96_n8_m1"], peers, timer)
    impls = ["rooftile", *peers]
    assert [(r["case"], r["variant"], r["impl"]) for r in rows] == [
        (case, variant, impl) for case in ("k64_n48_m3", "k96_n8_m1") for variant in ("fp16", "bf16") for impl in impls
    ]
    assert {r["bytes"] for r in rows if r["case"] == "k64_n48_m3"} == {2 * (64 * 48 + 3 * (64 + 48))}
    assert {r["flops"] for r in rows} == {2 * 3 * 64 * 48, 2 * 96 * 8}
    assert all(len(results) == 2 and torch.equal(*results) for results, _ in timer.captured) and not notes.left_out
    monkeypatch.setattr(rt, "linear", lambda x, weight, out=None: x @ weight.T + 0.1)
    rows, notes = measure(linear, ["k64_n48_m3"], peers)
    assert {r["impl"] for r in rows} == set(peers)  # of ours no row, and the run goes on
    assert [(n["case"], n["impl"], n["variant"], n["failed"]) for n in notes.left_out] == [
        ("k64_n48_m3", "rooftile", variant, True) for variant in ("fp16", "bf16")
    ]
    assert all(n["why"].startswith("wrong answer, relative error ") for n in notes.left_out)


@pytest.mark.parametrize("peers", [("cublas",), ()])
def test_a_case_of_w8a16(peers, bench_on_cpu):
    """Ours passes its check, the peer agrees, and what is read is the codes, scales, x and y."""
    timer = PretendedTimer()
    rows, notes = measure(w8a16, ["k128_n64_m3", "k256_n16_m1"], peers, timer)
    impls = [("rooftile", "int8-g128"), *((peer, "fp16") for peer in peers)]
    assert [(r["case"], r["impl"], r["variant"]) for r in rows] == [
        (case, *impl) for case in ("k128_n64_m3", "k256_n16_m1") for impl in impls
    ]
    read = [128 * 64 + 2 * 64 + 2 * 3 * (64 + 128), 256 * 16 + 2 * 2 * 16 + 2 * (16 + 256)]
    assert [r["bytes"] for r in rows if r["impl"] == "rooftile"] == read
    assert {r["flops"] for r in rows} == {2 * 3 * 64 * 128, 2 * 256 * 16}
    assert all(len(results) == 2 and torch.equal(*results) for results, _ in timer.captured) and not notes.left_out


def test_a_case_of_ops(bench_on_cpu):
    rows, notes = measure(ops, ["rms_norm_t3_h256", "rope_t2_h256"], ["torch.eager"])
    assert [(r["case"], r["impl"]) for r in rows] == [
        (case, impl) for case in ("rms_norm_t3_h256", "rope_t2_h256") for impl in ("rooftile", "torch.eager")
    ]
    assert {r["bytes"] for r in rows if r["case"] == "rms_norm_t3_h256"} == {4 * 3 * 256} and not notes.left_out


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
    rows, notes = measure(decode, cases)
    variants = {case: {r["variant"] for r in rows if r["case"] == case} for case in cases}
    assert variants[cases[0]] == variants[cases[1]] == set(decode.FORMATS["float16"]) - {"int4", "fp8"}
    assert variants[cases[2]] == set(decode.FORMATS["float16"]) - {"fp8"}
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [
        "head_dim 16 rooftile fp8 is left out: append: no kernel for fp8",
        "head_dim 16 rooftile int4 is left out: decode_attention: no kernel for int4",
    ]
    assert not any(note["failed"] for note in notes.left_out)


def test_a_case_that_memory_is_too_small_for(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(decode, "_DEVICE", "cpu")
    rows, notes = measure(decode, ["b64_kv32768"], ["torch.eager"])
    assert rows == [] and notes.left_out[0]["failed"] is False
    assert capsys.readouterr().err == "b64_kv32768 rooftile is left out: it needs 56.0 GiB, 1.0 are free\n"


# ---------------------------------------------------------------- a run, and who takes which turn


class Pretended:
    """A family of entries whose calls write down who was called."""

    def __init__(self, **calls):
        self.calls = calls

    def opened(self, peers, notes):
        def entry(impl, call):
            return timing.Entry(impl, "fp16", {impl: [call]}, 4_000_000, 0, 1e-4)

        return lambda case: [entry(impl, call) for impl, call in self.calls.items()]


def fails(text="no kernel image is available"):
    raise RuntimeError(text)


def test_entries_take_turns():
    """A round is one replay of each, in every second one the other way round: nobody always comes behind the same."""
    order = []

    class Timer(PretendedTimer):
        def replay(self, graph):
            order.append(graph)
            return super().replay(graph)

    rows, _ = measure(Pretended(rooftile=lambda: 1, cublas=lambda: 2, marlin=lambda: 3), ["a"], timer=Timer())
    rounds = len(order) // 3
    assert rounds == timing._WARM_UP + timing._ROUNDS and len(rows) == 3
    assert order == ([0, 1, 2, 2, 1, 0] * rounds)[: 3 * rounds]


def test_what_a_row_says_of_its_rounds():
    """Replays of the warm-up do not count; a call is a replay over its calls."""
    us = [1e6] * timing._WARM_UP + [float(100 + i) for i in range(timing._ROUNDS)]
    (row,), _ = measure(Pretended(rooftile=lambda: 1), ["a"], timer=PretendedTimer(lambda n: us[n - 1]))
    calls = timing._CALLS
    assert (row["us_min"], row["us"], row["us_max"]) == tuple(round(x / calls, 2) for x in (100, 110, 120))
    assert (row["us_p10"], row["us_p90"]) == (round(102 / calls, 2), round(118 / calls, 2))
    assert (row["sm_clock_mhz"], row["power_w"], row["l2"]) == (1755, 420, "cold")


def test_a_peer_that_fails_does_not_end_the_run(capsys):
    family = Pretended(rooftile=lambda: 1, marlin=fails, cublas=lambda: 2)
    rows, notes = measure(family, ["a", "b"])
    assert [(r["case"], r["impl"]) for r in rows] == [(c, i) for c in "ab" for i in ("rooftile", "cublas")]
    assert notes.left_out == [
        {
            "case": case,
            "impl": "marlin",
            "variant": "fp16",
            "why": "no kernel image is available",
            "failed": False,
        }
        for case in "ab"
    ]
    assert capsys.readouterr().err.count("marlin fp16 is left out: no kernel image is available\n") == 2


def test_ours_that_fails_is_told_from_a_peer():
    rows, notes = measure(Pretended(rooftile=fails, cublas=lambda: 2), ["a"])
    assert [r["impl"] for r in rows] == ["cublas"] and [n["failed"] for n in notes.left_out] == [True]


def test_a_lost_device_ends_the_run(monkeypatch):
    """A kernel that reads where nothing is takes the context with it: no later figure is worth anything."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fails("CUDA error: an illegal memory access"))
    with pytest.raises(rt.DeviceError, match="lost after a marlin fp16: illegal"):
        measure(Pretended(marlin=lambda: fails("illegal")), ["a", "b"])


def test_a_run_keeps_its_time(monkeypatch):
    clock = iter([0.0, 1.0, 9.0, 11.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    rows, notes = measure(Pretended(rooftile=lambda: 1), ["a", "b", "c"], seconds=10)
    assert [r["case"] for r in rows] == ["a", "b"]
    assert [(n["case"], n["why"], n["failed"]) for n in notes.left_out] == [("c", "the run's 10 s were over", False)]


def test_the_fastest_choice_is_timed():
    """Of a peer with several kernels; one that fails is none of them."""
    times = {0: 30.0, 1: 20.0}

    class Timer(PretendedTimer):
        def replay(self, graph):
            return times[graph]

    class Family:
        def opened(self, peers, notes):
            choices = {"slow": [lambda: 1], "bad": [fails], "fast": [lambda: 2]}
            return lambda case: [timing.Entry("machete", "int4-g128", choices, 10**9, 0, 0.0)]

    (row,), notes = measure(Family(), ["a"], timer=Timer())
    assert row["kernel"] == "fast" and row["us"] == 20.0 and not notes.left_out


def test_a_package_that_does_not_import_is_missing(monkeypatch):
    notes = runner.Notes()
    found = runner.installed(
        {"cublas", "marlin", "machete"}, dict.fromkeys(("marlin", "machete"), "vllm.nothing"), notes
    )
    assert found == {"cublas"} and {n["impl"] for n in notes.left_out} == {"marlin", "machete"}
    rows, _ = measure(Pretended(rooftile=lambda: 1, cublas=lambda: 1), ["a"])
    result = report.report("w4a16", rows, CEILING, ["cublas", "marlin", "machete"], notes, FACTS, "abc1234")
    assert result["missing"] == ["machete", "marlin"] and result["left_out"] == notes.left_out


@pytest.mark.parametrize("source", ["random", "file"])
def test_whole_models(source, tmp_path, capsys):
    given, out = ["--config", "tiny"], tmp_path / "m.json"
    if source == "file":
        given = ["--model", tiny_gguf.write(tmp_path / "tiny.gguf")]
    sizes = ["--prompt", "9", "--tokens", "6", "--batch", "1,3", "--device", "cpu"]
    assert main(["bench", "e2e", *given, *sizes, "--commit", "abc", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["schema"], result["family"], result["commit"]) == (1, "e2e", "abc") and result["seconds"] > 0
    run = result["run"]
    assert (run["prompt"], run["tokens"], run["device"]) == (9, 6, "cpu")
    assert (run["model"], run["weights"]) == (("tiny", "random") if source == "random" else ("tiny.gguf", "stored"))
    rows = result["rows"]
    assert [(row["name"], row["batch"]) for row in rows] == [(n, b) for n in e2e.rows_on("cpu") for b in (1, 3)]
    for row in rows:
        assert len(row["ms_per_token_rounds"]) == 3 and row["prompt_ms"] > 0 and row["peak_gib"] is None
        share = (row["weight_bytes_a_step"] + row["cache_bytes_a_step"]) / row["ms_per_token"] / 1e6
        assert row["percent_of_read_rate"] == pytest.approx(100 * share / result["read_gb_s"])
        assert ("ops" in row) is (row["name"] != "hf.eager")
        if "ops" in row:
            us = [op["us"] for op in row["ops"]]
            assert us == sorted(us, reverse=True) and min(us) > 0 and row["step_us"] > 0
            assert row["between_us"] == pytest.approx(1e3 * row["ms_per_token"] - row["step_us"])
            ops = {op["op"]: op for op in row["ops"]}
            assert ops["decode_attention"]["times"] == 2 and ops["decode_attention"]["bytes"] > 0
            read = sum(op["bytes"] for op in row["ops"])  # of products and attention; the rest is norms, tables, biases
            assert 0 <= row["weight_bytes_a_step"] + row["cache_bytes_a_step"] - read < 4096
    plain, whole, compressed, packed, both = rows[::2]
    if source == "random":
        # q, k, v, o 64 x (64 + 2 * 32 + 64), gate, up, down 3 * 64 * 96 in 2 layers, 5 norms of 64, the head 256 x 64
        weights = 2 * (2 * (64 * 192 + 3 * 64 * 96) + 5 * 64 + 256 * 64)
        assert 0 <= plain["weight_bytes_a_step"] - weights <= 256  # frequencies of the rotary embedding
        assert plain["cache_bytes_a_step"] == 1 * (9 + 4) * 2 * 1 * 32 * 4
    for fewer, more, of in ((packed, plain, "weight"), (compressed, plain, "cache")):
        assert fewer[f"{of}_bytes_a_step"] < more[f"{of}_bytes_a_step"] == whole[f"{of}_bytes_a_step"]
        assert both[f"{of}_bytes_a_step"] == fewer[f"{of}_bytes_a_step"]
    said = capsys.readouterr().out
    assert said.count("8-bit head") == 8 and said.count("between two steps") == 8


def test_a_real_model_row_by_row(tmp_path, capsys):
    path, text, out = tiny_gguf.write(tmp_path / "tiny.gguf"), tmp_path / "text.txt", tmp_path / "m.json"
    text.write_text("a b c d e f g h " * 200)
    given = ["--model", path, "--prompt", "9", "--tokens", "6", "--batch", "1", "--device", "cpu"]
    assert main(["bench", "e2e", *given, "--cumulative", "--text", str(text), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == list(e2e.CUMULATIVE)
    scores = [row["perplexity"] for row in rows]
    assert scores[1] == pytest.approx(scores[0], rel=1e-2)  # the same numbers in 16 bits
    assert scores[2] != scores[1] and scores[3] != scores[2] and scores[2] == pytest.approx(scores[1], rel=0.2)
    weights, cache = ([row[f"{of}_bytes_a_step"] for row in rows] for of in ("weight", "cache"))
    assert weights[0] == weights[1] == weights[2] > weights[3] and cache[0] == cache[1] > cache[2] == cache[4]
    assert ["ops" in row for row in rows] == [False] * 4 + [True]
    assert "perplexity" in capsys.readouterr().out
    for wrong, said in (
        (["--config", "tiny", "--cumulative"], "--cumulative: expected --model"),
        (["--config", "tiny", "--text", str(text)], "--text: is of --cumulative"),
        (["--model", path, "--random"], "is a file, expected a folder"),
    ):
        assert main(["bench", "e2e", "--device", "cpu", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_random_weights_of_a_folder(tmp_path):
    config = transformers.LlamaConfig(**e2e.CONFIGS["tiny"])
    config.save_pretrained(tmp_path / "shapes")
    given = ["--model", str(tmp_path / "shapes"), "--random", "--only", "16 bits", "--device", "cpu"]
    out = tmp_path / "m.json"
    assert main(["bench", "e2e", *given, "--prompt", "9", "--tokens", "6", "--batch", "1", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["run"]["weights"] == "random" and len(result["rows"]) == 2


def test_rows_of_whole_models():
    everywhere = ["hf.eager", "16 bits", "16 bits + int4-kivi", "W4A16, 8-bit head", "W4A16 + int4-kivi, 8-bit head"]
    assert e2e.rows_on("cpu") == everywhere
    assert e2e.rows_on("cuda") == [*everywhere[:1], "hf.static", *everywhere[1:]]
    assert e2e.rows_on("cuda", ["kivi", "eager"]) == [everywhere[i] for i in (0, 2, 4)]
    with pytest.raises(rt.ArgumentError, match=r"--only: expected a part of one of 'hf.eager', .*, got 'static'"):
        e2e.rows_on("cpu", ["static"])


def test_vllm_in_whole_models(monkeypatch, tmp_path, capsys):
    """Of a vLLM that notes what it is asked: no other one is here."""
    asked = types.SimpleNamespace(engines=[], calls=[])

    class LLM:
        def __init__(self, model, **options):
            config = json.loads((pathlib.Path(model) / "config.json").read_text())
            asked.engines.append(
                (options.get("load_format"), options["max_model_len"], options["max_num_seqs"], config)
            )

        def generate(self, prompts, sampling, use_tqdm):
            asked.calls.append((len(prompts), len(prompts[0]["prompt_token_ids"]), sampling.max_tokens))

    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, vllm.__spec__ = (
        LLM,
        types.SimpleNamespace,
        importlib.machinery.ModuleSpec("vllm", None),
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    assert e2e.VLLM in e2e.rows_on("cuda") and e2e.VLLM not in e2e.rows_on("cpu")
    file = tmp_path / "a.gguf"
    file.touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    assert not any(e2e.VLLM in e2e.rows_on("cuda", source=str(source)) for source in (file, tmp_path))
    rows, _ = e2e.run("tiny", [1, 3], 9, 6, "cpu", [e2e.VLLM, "hf.eager"])
    (engine,) = asked.engines
    assert engine[:3] == ("dummy", 15, 3) and engine[3]["architectures"] == ["LlamaForCausalLM"]
    assert engine[3]["num_hidden_layers"] == e2e.CONFIGS["tiny"]["num_hidden_layers"]
    assert {call[:2] for call in asked.calls} == {(1, 9), (3, 9)} and {call[2] for call in asked.calls} == {1, 3, 6}
    for ours, plain in zip(rows[:2], rows[2:], strict=True):
        assert ours["cache_bytes_a_step"] == plain["cache_bytes_a_step"] and ours["peak_gib"] is None
        assert 0 <= plain["weight_bytes_a_step"] - ours["weight_bytes_a_step"] <= 256  # frequencies in another dtype
    vllm.LLM = None
    rows, _ = e2e.run("tiny", [1], 9, 6, "cpu", ["hf.eager", e2e.VLLM])
    assert [row["name"] for row in rows] == ["hf.eager"]
    assert capsys.readouterr().err == "vllm is left out: TypeError: 'NoneType' object is not callable\n"


def test_a_slow_model_has_fewer_rounds(monkeypatch):
    monkeypatch.setattr(e2e, "_SECONDS", 0)
    rows, _ = e2e.run("tiny", [1], 5, 4, "cpu", ["16 bits"])
    assert [len(row["ms_per_token_rounds"]) for row in rows] == [1]


class WritesAtTimes:
    """An engine that writes what the yardstick writes, but for its token number `wrong`. turns: when the first and the
    last token come, in each of its turns.
    """

    variant = "made of nothing"

    def __init__(self, *turns, wrong=None):
        self.wrong, self.calls, self.turns = wrong, [], iter(turns)

    def write(self, ids, count):
        self.calls.append((tuple(ids), count))
        first, last = next(self.turns)
        return [i if i != self.wrong else -1 for i in range(count)], [first] * (count - 1) + [last]


def test_engines_take_turns():
    ours = WritesAtTimes((9, 9.5), (3, 10), (2, 16))  # the first turn sets things up
    peer = WritesAtTimes((9, 9.5), (1, 5), (2, 7), wrong=4)
    steps = []
    engines = {cpu.YARDSTICK: ours, "llama.cpp": peer}
    rows = cpu.run(engines, [7] * 30, 8, 2, runner.Notes(), lambda: steps.append(1))
    assert len(steps) == 6 and ours.calls == peer.calls == [((7,) * 30, 8)] * 3
    first, other = rows
    assert first["prompt_tok_s"] == (30 / 3 + 30 / 2) / 2 and first["decode_tok_s"] == (7 / 7 + 7 / 14) / 2
    assert first["ms_per_token"] == 1e3 / first["decode_tok_s"]
    assert first["seconds_rounds"] == [[3] * 7 + [10], [2] * 7 + [16]]
    assert first["against"] == {"llama.cpp": {"prompt": (1 / 3 + 1) / 2, "decode": (4 / 7 + 5 / 14) / 2}}
    assert (first["same_tokens"], other["same_tokens"], other["against"]) == (8, 4, {})
    out = io.StringIO()
    Console(file=out, width=200).print(cpu.table(rows))
    assert "0.67" in out.getvalue() and "decode /" in out.getvalue()


def test_an_engine_that_fails(monkeypatch):
    def fails(ids, count):
        raise RuntimeError("cannot read it")

    notes, peer = runner.Notes(), WritesAtTimes()
    monkeypatch.setattr(peer, "write", fails)
    rows = cpu.run({cpu.YARDSTICK: WritesAtTimes((1, 2), (1, 2)), "openvino": peer}, [1], 2, 1, notes)
    assert [row["name"] for row in rows] == [cpu.YARDSTICK]
    assert [(note["impl"], note["why"]) for note in notes.left_out] == [("openvino", "cannot read it")]
    with pytest.raises(RuntimeError, match="cannot read it"):
        cpu.run({cpu.YARDSTICK: peer}, [1], 2, 1, notes)


LLAMA_CPP = """
import os

__version__ = "9.8"


def llama_print_system_info():
    return b"CPU : AVX2 = 1 | AVX512 = 0 | AMX_INT8 = 1 | OPENMP = 1 | "


class Llama:  # what its engine asks of it
    def __init__(self, path, **options):
        assert options == {"n_ctx": 13, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        self.fresh = False

    def reset(self):
        self.fresh = True

    def generate(self, ids, temp, repeat_penalty):
        assert self.fresh and (temp, repeat_penalty) == (0.0, 1.0)
        self.fresh = False
        yield from range(100)
"""


def packages(tmp_path, monkeypatch, **texts):
    """Packages of one file that a process of a peer finds."""
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_file_on_the_cpu(tmp_path, capsys, monkeypatch):
    """Every row of a real file, and a peer; the other one does not take the file."""
    raises = "raise ImportError('built for another CPU')"
    packages(tmp_path, monkeypatch, llama_cpp=LLAMA_CPP, openvino=raises)
    monkeypatch.setattr("rooftile.loaders.demo_text", lambda: "the text " * 20)
    path, out = tiny_gguf.write(tmp_path / "tiny.gguf"), tmp_path / "cpu.json"
    given = ["--model", path, "--prompt", "9", "--tokens", "4", "--rounds", "2", "--peers", "--json", str(out)]
    assert main(["bench", "cpu", *given, "--threads", "1", "--commit", "abc"]) == 0
    result = json.loads(out.read_text())
    assert (result["family"], result["run"]["weights"], result["run"]["threads"]) == ("cpu", "stored", 1)
    assert result["seconds"] > 0
    assert [row["name"] for row in result["rows"]] == [*cpu.ROWS, "llama.cpp"]
    assert [note["impl"] for note in result["left_out"]] == ["openvino"]
    assert result["left_out"][0]["why"] == "ImportError: built for another CPU"
    assert result["rows"][-1]["variant"] == "9.8 AVX2 AMX_INT8"
    for row in result["rows"]:
        assert [len(at) for at in row["seconds_rounds"]] == [4, 4] and row["prompt_tok_s"] > 0
        assert all(at == sorted(at) and at[0] > 0 for at in row["seconds_rounds"])
        assert row["ms_per_token"] == pytest.approx(1e3 / row["decode_tok_s"])
    assert result["rows"][0]["same_tokens"] == 4
    assert "llama.cpp" in capsys.readouterr().out


def test_a_peer_that_dies(tmp_path, monkeypatch):
    packages(tmp_path, monkeypatch, llama_cpp=LLAMA_CPP.replace("self.fresh = True", "os._exit(5)"))
    engine = cpu.Apart(cpu.LlamaCpp, "none.gguf", 1, 13)
    with pytest.raises(RuntimeError, match="ended with exit code 5"):
        engine.write([1, 2], 1)
    engine.close()


def test_a_peer_ends_without_a_word(tmp_path, monkeypatch, capfd):
    packages(tmp_path, monkeypatch, llama_cpp=LLAMA_CPP)
    engine = cpu.Apart(cpu.LlamaCpp, "none.gguf", 1, 13)
    monkeypatch.setattr(engine.process, "terminate", lambda: None)  # it sees that nobody asks any more
    engine.close()
    engine.process.join(30)
    assert engine.process.exitcode == 0 and capfd.readouterr().err == ""


def test_files_that_cannot_be_timed(tmp_path, capsys, monkeypatch):
    for path, said in ((tmp_path, "is a folder, expected a GGUF file"), (tmp_path / "none", "there is no such file")):
        assert main(["bench", "cpu", "--model", str(path)]) == 2
        assert f"--model {path}: {said}" in capsys.readouterr().err
    monkeypatch.setattr("rooftile.loaders.demo_text", lambda: "a b")
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    assert main(["bench", "cpu", "--model", path, "--prompt", "99"]) == 2
    assert "--prompt: the text has" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["e2e", "layer"])
@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "no file named config.json|Unrecognized model|config.json"), ("{", "config.json"), ("{}", "model_type")],
)
def test_folders_that_hold_no_model(family, config, said, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    assert main(["bench", family, "--device", "cpu", "--model", str(folder)]) == 2
    err = capsys.readouterr().err
    assert str(folder) in err and re.search(said, err), err


@pytest.mark.parametrize("weights", ["w4a16", "none"])
def test_the_ops_of_a_step(weights, tmp_path, capsys):
    out = tmp_path / "layer.json"
    given = ["--weights", weights, "--head", "none", "--kv-cache", "int8", "--tokens", "20", "--batch", "1,3"]
    assert main(["bench", "layer", "--config", "tiny", "--device", "cpu", *given, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["schema"], result["family"]) == (1, "layer")
    run = result["run"]
    assert (run["layer_weights"], run["kv_cache"], run["head"], run["tokens"]) == (weights, "int8", "none", 20)
    product = "linear" if weights == "none" else "w4a16_matmul"
    gated = [f"{product} 64 -> 192", "silu_mul"] if weights == "none" else [f"{product} 64 -> 96 silu_mul"]
    layer = ["rms_norm", f"{product} 64 -> 128", "rope_append", "decode_attention", f"{product} 64 -> 64 + residual"]
    layer += ["rms_norm", *gated, f"{product} 96 -> 64 + residual"]
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert [op["op"] for op in row["ops"]] == ["copy_", *layer, "rms_norm", "linear 64 -> 256"]
        assert [op["times"] for op in row["ops"]] == [1] + [2] * len(layer) + [1, 1]
        for op in row["ops"]:
            assert op["chain_us"] > 0 and op["alone_us"] > 0 and op["left_out_us"] is None
        for sum_of in ("chain_us", "alone_us"):
            assert row[sum_of] == pytest.approx(sum(op["times"] * op[sum_of] for op in row["ops"]))
        assert row["step_us"] > 0
    assert capsys.readouterr().out.count("together") == 2


def test_a_call_in_a_row_does_not_outgrow_its_cache():
    """An op that stores a token is repeated; the caches are as long as before, and no longer than they may be."""
    options = {"weights": "w4a16", "kv_cache": "int4-kivi"}
    step = layer.Step(e2e.random_model("tiny", "cpu", e2e.Row(options)), "int4-kivi", 2, 130)
    at = next(i for i, call in enumerate(step.calls) if call.func.__name__ == "rope_append")
    assert layer.alone(step, step.same_op(at), 1e-3, None) > 0  # as often as an op can be repeated
    assert all(130 < cache.lengths[0] <= cache.capacity for cache in step.caches)
    step.reset()
    assert [list(cache.lengths) for cache in step.caches] == [[130, 130]] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "llama3.1-8"], ("--config: expected one of llama3.1-8b", 'did you mean "llama3.1-8b"')),
        (["--model", "none.gguf"], ("--model none.gguf", "no such file")),
        (["--config", "tiny", "--prompt", "600", "--batch", "1"], ("--prompt, --tokens", "context of 512")),
        (["--config", "tiny", "--device", "abacus"], ("--device", "abacus")),
    ],
)
def test_whole_models_that_cannot_be_timed(arguments, words, capsys):
    assert main(["bench", "e2e", *([] if "--device" in arguments else ["--device", "cpu"]), *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("option", "value"), [("--tokens", "1"), ("--batch", "1,0"), ("--batch", ""), ("--prompt", "x")]
)
def test_sizes_of_whole_models(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "e2e", option, value])
    assert caught.value.code == 2 and "expected" in capsys.readouterr().err


def test_the_host_cost_of_calls(capsys, monkeypatch):
    """The script measures every case, the longer one as longer, and says so in JSON."""
    script = bench_scripts.load("host_cost")
    calls = {"short": lambda: None, "long": lambda: sum(range(10_000))}
    times = script.measure(calls, "cpu", rounds=3, count=5)
    assert {len(us) for us in times.values()} == {3} and min(times["long"]) > 10 * min(times["short"])
    monkeypatch.setattr(sys, "argv", ["host_cost.py", "--device", "cpu", "--rounds", "2", "--calls", "3", "--json"])
    script.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["case"] for r in rows] == list(script.cases("cpu")) and all(0 < r["us_min"] <= r["us"] for r in rows)


def test_no_path_of_a_machine_is_told(capsys):
    """Errors of peers name the file that they were compiled from: of it the name is told, not where it lay."""
    notes = runner.Notes()
    for why in (
        ImportError("/home/me/peers/libfa3.so: undefined symbol"),
        RuntimeError('Error in "/build.d/x-1/include/decode.cuh":217: head_dim 64, half/int8, at https://a.org/b/c'),
    ):
        notes.leave_out("a", "peer", "", why)
    whys = [n["why"] for n in notes.left_out]
    assert whys == [
        "libfa3.so: undefined symbol",
        'Error in "decode.cuh":217: head_dim 64, half/int8, at https://a.org/b/c',
    ]
    assert "/home" not in capsys.readouterr().err


def test_the_ceilings(monkeypatch):
    """Single products with rest between them, and the same without."""

    class Timer(PretendedTimer):
        def sustained(self, graph):
            return 8 * 2 * 8192**3 / 600e6, 1410, 698

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    monkeypatch.setattr(timing, "read_gb_s", lambda _: 4500.04)
    monkeypatch.setattr(timing, "_copy", lambda _: 4100.0)
    monkeypatch.setattr(timing, "_DEVICE", "meta")
    found = timing.ceilings(Timer(lambda _: 2 * 4096 * 14336 * 4096 / 800e6))
    assert found["read_gb_s"] == 4500.0 and found["bf16_sustained_tflop_s"] == 600.0
    assert found["bf16_burst_tflop_s"] == pytest.approx(800 * 8192**3 / (4096 * 14336 * 4096), abs=0.1)
    assert (found["sustained_sm_clock_mhz"], found["sustained_power_w"]) == (1410, 698)
    assert set(found) == set(CEILING)


class PretendedNvml:
    """The four functions of NVML that are called."""

    def __init__(self, power=0, clock=0, uuid=b"GPU-ab-12"):
        self.power, self.clock, self.uuid = power, clock, uuid

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        handle._obj.value = 7
        return int(uuid != self.uuid)

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        assert handle.value == 7 and kind == 1
        clock._obj.value = 1845
        return self.clock

    def nvmlDeviceGetFieldValues(self, handle, count, field):
        assert count == 1 and field._obj.field == 186
        field._obj.value, field._obj.status = 512_400, self.power
        return 0


@pytest.mark.parametrize(
    ("nvml", "read"),
    [
        (PretendedNvml(), (1845, 512)),
        (PretendedNvml(power=3), (1845, None)),
        (PretendedNvml(clock=3), (None, 512)),
        (PretendedNvml(uuid=b"GPU-other"), (None, None)),
        (None, (None, None)),
    ],
)
def test_clock_and_power(nvml, read):
    def load(name):
        if nvml is None:
            raise OSError(name)
        return nvml

    assert timing.Meter("ab-12", load).read() == read


@pytest.mark.parametrize("bits, zeros", [(4, None), (4, "minima"), (8, None)])
def test_copies_of_a_weight_share_no_memory(bits, zeros, monkeypatch):
    monkeypatch.setattr(products, "rotation", lambda _: (3, "cold"))
    weight_type = {4: rt.W4Weight, 8: rt.W8Weight}[bits]
    w = weight_type.quantize(torch.randn(32, 128, dtype=torch.float16), group_size=32, zeros=zeros)
    (copies, l2), exact = products.packed_copies(w)
    places = [a.data_ptr() for c in copies for a in (c.codes, c.scales, c.offsets) if a is not None]
    assert len(set(places)) == len(places) == (9 if zeros else 6) and l2 == "cold"
    assert all(torch.equal(c.dequantize("float32"), exact) for c in copies)


def test_a_peer_that_is_left_out_is_named(monkeypatch, bench_on_cpu, capsys):
    """It refuses the shape, as cuDNN does on a CPU, or errs; the others are timed."""
    case, peers = "b1_kv64_hq2_hkv1_d16", ["torch.eager", "torch.sdpa.cudnn"]
    rows, _ = measure(decode, [case], peers)
    assert "torch.eager" in {r["impl"] for r in rows}
    assert re.search(rf"^{case} torch\.sdpa\.cudnn is left out: \S", capsys.readouterr().err, re.MULTILINE)
    monkeypatch.setattr(decode, "exact", lambda *_: torch.ones(1))
    assert measure(decode, [case], peers)[0] == []
    assert f"{case} torch.eager is left out: wrong answer, relative error" in capsys.readouterr().err


def test_copies_that_the_l2_cannot_hold(monkeypatch):
    """What so many copies of cannot exceed is called warm."""
    mib = 2**20
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=50 * mib))
    sizes = (mib // 2, mib, 60 * mib, 100 * mib, 1500 * mib, 1501 * mib)
    assert [timing.rotation(n) for n in sizes] == [(n, "cold") for n in (301, 151, 3, 2, 2, 1)]
    assert [timing.rotation(n) for n in (1, 8192)] == [(8, "warm")] * 2


class PretendedCuda:
    """What the timer uses of torch.cuda: work is a clock that a replay moves by 300 us, a rest by its length."""

    def __init__(self, monkeypatch):
        self.now, self.said = 0.0, []
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Graph:
            def replay(self):
                cuda.now += 300.0
                cuda.said.append("replay")

        def rest(seconds):
            self.now += 1e6 * seconds
            self.said.append(round(1e6 * seconds))

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "graph": lambda _: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "_sleep": lambda cycles: self.said.append("spin"),
            "current_device": lambda: 0,
            "get_device_properties": lambda _: types.SimpleNamespace(uuid="ab-12", L2_cache_size=50 << 20),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(timing.time, "sleep", rest)
        monkeypatch.setattr(timing.time, "monotonic", lambda: self.now / 1e6)
        monkeypatch.setattr(timing.Meter, "read", lambda self: (1755, 420))


def test_a_replay_is_queued_before_its_clock_starts_and_followed_by_rest(monkeypatch):
    cuda, calls = PretendedCuda(monkeypatch), []
    timer = timing.GpuTimer()
    graph = timer.capture([lambda: calls.append(1), lambda: calls.append(2), lambda: calls.append(3)], 2)
    assert calls == [1, 2] + [1, 2, 3] * 2  # first calls load modules
    assert timer.replay(graph) == 300.0 and cuda.said == ["spin", "replay", 900]
    cuda.said.clear()
    assert timer.under_load(graph, 300.0) == (1755, 420) and cuda.said == ["replay"] * 64 + [round(0.8 * 64 * 300)]
    cuda.said.clear()
    assert timer.sustained(graph, seconds=0.003) == (300.0, 1755, 420) and cuda.said == ["replay"] * 18


@pytest.mark.parametrize("lost", [False, True])
def test_the_command_with_a_pretended_gpu(monkeypatch, bench_on_cpu, tmp_path, capsys, lost):
    """From the arguments to the file, which is whole after every case."""
    PretendedCuda(monkeypatch)
    path, state = tmp_path / "linear.json", []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rt._C, "gpu_backend", lambda: "cuda")
    monkeypatch.setattr("rooftile.cli.bench.machine", lambda device: FACTS)
    monkeypatch.setattr(timing, "ceilings", lambda timer: CEILING)
    entries_of = linear.opened

    def opened(peers, notes):
        def entries(case):
            state.append(path.exists() and len(json.loads(path.read_text())["rows"]))
            if lost and case == "k96_n8_m1":
                raise rt.DeviceError("bench: the device is lost after k96_n8_m1 cublas fp16: an error")
            return inner(case)

        inner = entries_of(peers, notes)
        return entries

    monkeypatch.setattr(linear, "opened", opened)
    cases = ["--case", "k64_n48_m3", "--case", "k96_n8_m1"]
    arguments = ["bench", "linear", *cases, "--peers", "--seconds", "60", "--json", str(path), "--commit", "abc1234"]
    assert main(arguments) == int(lost) and state == [False, 4]
    said = capsys.readouterr()
    result = json.loads(path.read_text())
    assert len(result["rows"]) == (4 if lost else 8) and ("the device is lost after" in said.err) == lost
    assert result["missing"] == [] and result["rows"][0]["us"] == 15.0 and "k64_n48_m3" in said.out
    assert main([*arguments, "--without", "cublas"]) == int(lost)
    assert {r["impl"] for r in json.loads(path.read_text())["rows"]} == {"rooftile"}
    assert main([*arguments, "--without", "marlin"]) == 2
    assert "--without marlin: the peers of linear are cublas" in capsys.readouterr().err


# ---------------------------------------------------------------- the attention of others


class PretendedFlashInfer:
    """The wrappers that are called, with FlashInfer's signatures, over plain arrays."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
            assert kv_layout == "NHD" and use_tensor_cores and backend == "fa2"

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode="NONE",
            q_data_type="float16",
            kv_data_type=None,
        ):
            self.rows = [
                (indices[a:b].long(), (b - a - 1) * page_size + n)
                for a, b, n in zip(indptr[:-1], indptr[1:], last_page_len.tolist(), strict=True)
            ]
            self.kv, self.steps = kv_data_type, 1

        def run(self, q, paged_kv_cache):
            assert {x.dtype for x in paged_kv_cache} == {self.kv}
            out = []
            for (pages, n), x in zip(self.rows, q.split(self.steps), strict=True):
                k, v = (c[pages].float().reshape(1, -1, *c.shape[2:])[:, :n] for c in paged_kv_cache)
                out.append(decode.exact(x[None], k, v)[0])
            return torch.cat(out).half()

    class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
        def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
            assert kv_layout == "NHD" and backend == "fa2"

        def plan(self, qo_indptr, *arguments, causal=False, **types):
            assert causal and len(set(qo_indptr.diff().tolist())) == 1
            super().plan(*arguments, **types)
            self.steps = int(qo_indptr[1])


def pretended_fa3(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=None, block_table=None, **options):
    assert options.pop("causal") and options.pop("scheduler_metadata", "planned") == "planned"
    left, right = options.pop("window_size")
    assert not options and right in (-1, 0)
    out = []
    for b, n in enumerate(seqused_k.tolist()):
        pages = block_table[b].long()
        rows = (x[pages].reshape(1, -1, *x.shape[2:])[:, :n] for x in (k, v))
        out.append(decode.exact(q[None, cu_seqlens_q[b] : cu_seqlens_q[b + 1]], *rows, left + 1)[0])
    return torch.cat(out).half()


@pytest.fixture
def others(monkeypatch):
    """FlashInfer and vLLM's FlashAttention-3, pretended."""
    fa3 = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    fa3.flash_attn_varlen_func = pretended_fa3
    fa3.get_scheduler_metadata = lambda *sizes, **options: "planned"
    package = types.ModuleType("vllm.vllm_flash_attn")
    package.flash_attn_interface = fa3
    for module in (types.ModuleType("vllm"), package, fa3):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    flashinfer = types.ModuleType("flashinfer")
    vars(flashinfer).update({k: v for k, v in vars(PretendedFlashInfer).items() if k.startswith("Batch")})
    decoding = types.ModuleType("flashinfer.decode")

    def xqa(q, kv_cache, workspace, tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0):
        assert seq_lens.dtype == torch.uint32 and not workspace.any() and bmm2_scale == 1.0
        assert bmm1_scale == q.shape[-1] ** -0.5 and max_seq_len == max(seq_lens.tolist())
        starts = torch.arange(len(q) + 1)
        lengths = seq_lens.view(torch.int32)
        return pretended_fa3(q, *kv_cache, 1, starts, max_seq_len, lengths, tables, causal=True, window_size=(-1, -1))

    decoding.xqa_batch_decode_with_kv_cache = xqa
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decoding)


PAGED = {"flashinfer", "flashinfer.fp8", "flash_attn_3"}


@pytest.mark.parametrize(
    ("case", "peers"),
    [
        ("b2_kv128_hq4_hkv2_d128", PAGED | {"flashinfer.xqa"}),
        ("b2_kv300_hq4_hkv2_d128_paged16", PAGED),
        ("b2_kv300_hq4_hkv2_d128_paged64_shared", PAGED | {"flashinfer.xqa"}),
        ("ragged3_hq4_hkv2_d128", PAGED | {"flashinfer.xqa"}),
        ("b2_kv300_hq4_hkv2_d128_w100", PAGED),
        ("b2_kv128_hq4_hkv2_d128_t4", PAGED),
        ("b2_kv300_hq4_hkv2_d128_t3_w100", {"flash_attn_3"}),
        ("b2_kv128_hq4_hkv2_d64", PAGED - {"flash_attn_3"} | {"flashinfer.xqa"}),
    ],
)
def test_others_are_given_the_rows_they_expect(case, peers, others, bench_on_cpu):
    rows, notes = measure(decode, [case], attention_peers.MODULES)
    assert {r["impl"] for r in rows} - {"rooftile"} == peers
    assert {(n["impl"], n["failed"]) for n in notes.left_out} <= {("rooftile", False)}
    ours = {r["variant"]: r for r in rows if r["impl"] == "rooftile"}
    for r in rows:
        if r["impl"] in PAGED and "paged" not in case:
            assert r["bytes"] == ours["fp16"]["bytes"] // (2 if r["variant"] == "fp8" else 1)


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer.fp8", "flash_attn_3"])
def test_others_that_are_wrong_are_not_timed(name, others, bench_on_cpu, monkeypatch, capsys):
    """Each of them is held against float32 on the values that its own cache stands for."""
    monkeypatch.setattr(attention_peers, "_starts", lambda counts, device: torch.zeros(len(counts) + 1).int())
    rows, _ = measure(decode, ["b2_kv128_hq4_hkv2_d128"], [name])
    assert {r["impl"] for r in rows} == {"rooftile"} and f"{name} is left out" in capsys.readouterr().err


# ---------------------------------------------------------------- the results file


@pytest.mark.parametrize(("printed", "driver"), [("580.1", "580.1"), ("", "unknown"), (None, "unknown")])
def test_driver_of_the_gpu_that_torch_uses(monkeypatch, printed, driver):
    """Its UUID is asked for: number 0 of nvidia-smi may be another one."""
    asked = []
    monkeypatch.setattr(_results, "output", lambda *command: (asked.append(command), printed)[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab-12"))
    assert _results.machine("cuda:1")["driver"] == driver and asked[0][-2:] == ("-i", "GPU-ab-12")


def test_clocks_that_nobody_knows():
    entry = timing.Entry("rooftile", "fp16", {}, 10**7, 0, 0.0)
    rows = [report.row("a", entry, "k", timing.Times(10.0, 9.0, 11.0, 9.5, 10.5), CEILING)]
    result = report.report("decode", rows, CEILING, (), runner.Notes(), FACTS, "abc1234")
    assert result["machine"]["sm_clock_mhz"] == [] and "MHz" not in TABLES.caption(result)


def a_row(case, impl, variant, us, nbytes=40_000_000, flops=160_000_000, error=1e-4, mhz=1755):
    times = timing.Times(us, us - 1, us + 2, us - 0.5, us + 1, mhz, 400)
    entry = timing.Entry(impl, variant, {}, nbytes, flops, error)
    return report.row(case, entry, f"kernel_{variant}", times, CEILING)


def measured(family="decode", missing=("flashinfer",)):
    """A made-up result: two cases, two formats, two peers; the second case lacks one of the formats."""
    rows = [
        a_row("a", "rooftile", "fp16", 12.5, mhz=1410),
        a_row("a", "rooftile", "int8", 10.0),
        a_row("a", "torch.eager", "fp16", 50.0),
        a_row("a", "torch.sdpa", "fp16", 25.0),
        a_row("b", "rooftile", "fp16", 200.0),
        a_row("b", "torch.eager", "fp16", 100.0),
    ]
    return report.report(family, rows, CEILING, {*missing, "torch.eager"}, runner.Notes(), FACTS, "abc1234")


def test_a_row_is_held_against_the_nearer_roof():
    streams = a_row("a", "rooftile", "fp16", 10.0, 20_000_000, 10**9, 1.234e-4)
    assert streams["gb_s"] == 2000.0 and streams["tflop_s"] == 100.0
    assert streams["percent_of_roof"] == 50.0  # 2000 of 4000 GB/s; 100 of 700 TFLOP/s is less
    assert (streams["us"], streams["us_min"], streams["us_max"]) == (10.0, 9.0, 12.0)
    assert (streams["us_p10"], streams["us_p90"]) == (9.5, 11.0)
    assert streams["rel_err"] == 1.2e-4 and streams["l2"] == "cold"
    computes = a_row("a", "rooftile", "fp16", 10.0, 2_000_000, 35 * 10**8)
    assert computes["percent_of_roof"] == 50.0  # 350 of 700 TFLOP/s, the rate of a burst


def test_a_report_is_plain_json():
    result = measured()
    assert json.loads(json.dumps(result)) == result
    assert result["schema"] == 1 and result["family"] == "decode" and result["commit"] == "abc1234"
    assert result["machine"] == FACTS | {"sm_clock_mhz": [1410, 1755], "power_w": [400, 400]}
    assert result["missing"] == ["flashinfer"] and result["harness"] == timing.HARNESS and result["left_out"] == []


@pytest.mark.parametrize(
    ("us", "variant", "peer", "peer_ratio", "level"),
    [
        (50.0, "fp16", "torch.sdpa", 2.0, False),
        (99.0, "fp16", "torch.sdpa", 1.01, True),  # 98.5 .. 100 and 99.5 .. 101
        (101.6, "fp16", "torch.sdpa", 0.984, False),  # 101.1 .. 102.6
        (50.0, "int8", "flashinfer.fp8", 1.6, False),  # codes against whatever is fastest, 16 bits against 16 bits
    ],
)
def test_who_is_faster_and_what_is_level(us, variant, peer, peer_ratio, level):
    rows = [
        a_row("a", "rooftile", variant, us),
        a_row("a", "torch.sdpa", "fp16", 100.0),
        a_row("a", "flashinfer.fp8", "fp8", 80.0),
        a_row("b", "cublas", "fp16", 1.0),
    ]
    ours, *others = report.beside_peers(rows)
    assert (ours["peer"], ours["peer_ratio"], ours["level"]) == (peer, peer_ratio, level) and others == rows[1:]
    alone = report.beside_peers(rows[:1])[0]
    assert (alone["peer"], alone["peer_ratio"], alone["level"]) == (None, None, None)


def test_the_table_on_the_terminal():
    out = io.StringIO()
    Console(file=out, width=200).print(report.table(measured()))
    text = out.getvalue()
    assert "decode on A GPU: reads at most 4000 GB/s, bf16 700 TFLOP/s in a burst, 600 sustained" in text
    assert "flashinfer" in text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "rooftile" in line]
    assert lines == [
        ["a", "rooftile", "fp16", "12.5", "12.0-13.5", "3200", "13", "80.0", "1410", "400", "2.00"],
        ["a", "rooftile", "int8", "10.0", "9.5-11.0", "4000", "16", "100.0", "1755", "400", "2.50"],
        ["b", "rooftile", "fp16", "200.0", "199.5-201.0", "200", "1", "5.0", "1755", "400", "0.50"],
    ]


def test_the_table_is_whole_where_nobody_watches(capsys):
    print_whole(Console(width=40), report.table(measured()))
    text = capsys.readouterr().out
    assert "…" not in text and "┃ x best peer ┃" in text


# ---------------------------------------------------------------- bench/tables.py


def test_the_markdown_table():
    lines = TABLES.table(measured()).splitlines()
    assert lines[:5] == [
        "| case | fp16 | int8 | fastest peer | peer / ours |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| a | 12.5 ± 0.8 (80 %) | 10.0 ± 0.8 (100 %) | 25.0 ± 0.8 torch.sdpa | 2.00 / 2.50 |",
        "| b | 200 ± 0.8 (5 %) |  | 100 ± 0.8 torch.eager | 0.50 |",
        "",
    ]
    facts = "A GPU", "1410-1755 MHz", "400 W", "4000 GB/s", "700 TFLOP/s", "600 sustained", "flashinfer", "abc1234"
    for fact in (*facts, timing.HARNESS):
        assert fact in lines[5], fact


def test_a_table_says_what_is_level_and_what_is_warm():
    rows = [a_row("a", "rooftile", "bf16", 10.0), a_row("a", "torch.eager", "bf16", 10.5)]
    rows = [r | {"l2": "warm"} for r in rows]
    result = report.report("ops", rows, CEILING, (), runner.Notes(), FACTS, "abc1234")
    assert TABLES.table(result).splitlines()[2] == (
        "| a (warm) | 10.0 ± 0.8 (100 %) | 10.5 ± 0.8 torch.eager | level |"
    )


def test_a_table_names_every_peer_that_ours_is_held_against():
    """The fastest of 16 bits for 16 bits, the fastest of all for codes."""
    rows = [
        a_row("a", "rooftile", "fp16", 20.0),
        a_row("a", "rooftile", "fp8", 10.0),
        a_row("a", "flashinfer", "fp16", 25.0),
        a_row("a", "flashinfer.fp8", "fp8", 15.0),
    ]
    result = report.report("decode", rows, CEILING, (), runner.Notes(), FACTS, "abc1234")
    assert (
        TABLES.table(result)
        .splitlines()[2]
        .endswith("| 25.0 ± 0.8 flashinfer<br>15.0 ± 0.8 flashinfer.fp8 | 1.25 / 1.50 |")
    )


def test_a_table_without_peers_and_of_some_cases():
    result = measured(missing=())
    result["rows"] = report.beside_peers([r for r in result["rows"] if r["impl"] == "rooftile"])
    assert TABLES.table(result, ["b"]).splitlines()[:3] == [
        "| case | fp16 |",
        "| --- | ---: |",
        "| b | 200 ± 0.8 (5 %) |",
    ]
    assert "not measured" not in TABLES.caption(result)
    with pytest.raises(ValueError, match="no case of decode matches c"):
        TABLES.table(result, ["c"])


def test_a_table_of_some_variants():
    assert TABLES.table(measured(), ["variant=int?"]).splitlines()[:4] == [
        "| case | int8 | fastest peer | peer / ours |",
        "| --- | ---: | ---: | ---: |",
        "| a | 10.0 ± 0.8 (100 %) | 25.0 ± 0.8 torch.sdpa | 2.50 |",
        "",
    ]
    both = TABLES.table(measured(), ["a", "b", "variant=fp16", "variant=int8"])
    assert both == TABLES.table(measured(), ["?"]) == TABLES.table(measured())
    with pytest.raises(ValueError, match="no case of decode matches b or variant=int8"):
        TABLES.table(measured(), ["b", "variant=int8"])


def test_where_a_release_stands():
    """Won, level and lost of every variant, with the best and the worst case."""
    lines = TABLES.standing([measured(), measured("w8a16")]).splitlines()
    assert lines[0] == "|  | cases | faster | level | slower | peer / ours at best | at worst |"
    assert lines[2:6] == [
        "| decode fp16 | 2 | 1 | 0 | 1 | 2.00 a (torch.sdpa) | 0.50 b (torch.eager) |",
        "| decode int8 | 1 | 1 | 0 | 0 | 2.50 a (torch.sdpa) | 2.50 a (torch.sdpa) |",
        "| w8a16 fp16 | 2 | 1 | 0 | 1 | 2.00 a (torch.sdpa) | 0.50 b (torch.eager) |",
        "| w8a16 int8 | 1 | 1 | 0 | 0 | 2.50 a (torch.sdpa) | 2.50 a (torch.sdpa) |",
    ]
    assert lines[-1].startswith("A GPU, commit abc1234 (20")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results: decode of two machines, ops of one."""
    folder = tmp_path / "results"
    for name, result in {
        "one/decode": measured(),
        "two/decode": measured() | {"commit": "def5678"},
        "one/ops": measured("ops"),
    }.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    monkeypatch.setattr(TABLES, "RESULTS", folder)
    monkeypatch.setattr(TABLES.fill, "__defaults__", (folder, ()))
    return folder


PAGE = (
    "before\n<!-- table: one/decode -->\nold\n<!-- end of table -->\nbetween\n<!-- table: one/decode b* x -->\n"
    "<!-- end of table -->\n<!-- table: one/ops -->\n<!-- end of table -->\n<!-- table: one/standing -->\n"
    "<!-- end of table -->\nafter\n"
)


def test_tables_are_written_between_their_markers(results, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert TABLES.main(["--into", str(page)]) == 0
    once = page.read_text()
    assert TABLES.main(["--into", str(page)]) == 0
    assert page.read_text() == once and "old" not in once  # and again changes nothing
    assert once.count("| a |") == 2 and once.count("| b |") == 3 and once.count("| ops fp16 |") == 1
    assert once.startswith("before\n<!-- table: one/decode -->\n| case |")
    assert "between\n<!-- table: one/decode b* x -->\n" in once and once.endswith("<!-- end of table -->\nafter\n")
    capsys.readouterr()
    assert TABLES.main([str(results / "one" / "decode.json"), "a"]) == 0
    assert capsys.readouterr().out == TABLES.table(measured(), ["a"])


def test_tables_of_another_machine(results, tmp_path, capsys):
    """One option moves the pages to another machine, as far as it was measured there."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert TABLES.main(["--machine", "one=two", "--into", str(page)]) == 0
    text = page.read_text()
    markers = re.findall(r"<!-- table: (\S+)", text)
    assert markers == ["two/decode", "two/decode", "one/ops", "two/standing"]
    assert text.count("def5678") == 3 and text.count("abc1234") == 1 and "| ops fp16 |" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no marker", "no `<!-- table: MACHINE/FAMILY -->`"),
        ("<!-- table: one/decode -->\nnever ends", "no `<!-- table: MACHINE/FAMILY -->`"),
        (
            "<!-- table: one/decode -->\n<!-- table: x -->\n<!-- end of table -->\n",
            "no `<!-- table: MACHINE/FAMILY -->`",
        ),
        ("<!-- table: three/decode -->\n<!-- end of table -->\n", "three/decode: there is no"),
        ("<!-- table: one/decode nothing -->\n<!-- end of table -->\n", "no case of decode matches nothing"),
    ],
)
def test_tables_refuse(results, tmp_path, capsys, text, words):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit):
        TABLES.main(["--into", str(page)])
    assert words in capsys.readouterr().err and page.read_text() == text


def test_tables_of_another_schema(results, capsys):
    path = results / "one" / "decode.json"
    path.write_text(json.dumps(measured() | {"schema": 2}))
    with pytest.raises(SystemExit):
        TABLES.main([str(path)])
    assert "schema 2, this script reads 1" in capsys.readouterr().err


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

    def machete_supported_schedules(self, a_type, b_type, group_scales_type):
        return ["128x16_1x1x1"]

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
        assert b_q.shape[0] * 8 == b_group_scales.shape[0] * b_group_size and schedule in (None, "128x16_1x1x1")
        return self.product(a, b_q, b_group_scales)


def test_vllm_is_given_the_weight_it_expects(monkeypatch):
    w = rt.W4Weight.quantize(torch.randn(24, 256).half(), group_size=128)
    codes, scales, _ = w.unpack()
    with pytest.raises(ImportError):  # not installed here
        vllm_products.products(codes, scales, 128)
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
    assert list(found["machete"][1]) == ["vllm.machete", "vllm.machete 128x16_1x1x1"]
    for pack, calls in found.values():
        assert all(torch.equal(call(x, pack()), expected.half()) for call in calls.values())


def test_a_case_of_w4a16(monkeypatch, bench_on_cpu):
    """Ours in every variant, and the peers that are there, which share one weight."""
    monkeypatch.setattr(products, "SHAPES", ((128, 64),))
    peers = ("cublas", "marlin", "machete")
    rows, notes = measure(w4a16, ["k128_n64_m16", "k256_n16_m1"], peers)
    assert [(r["case"], r["impl"], r["variant"]) for r in rows] == [
        ("k128_n64_m16", "rooftile", "int4-g128"),
        ("k128_n64_m16", "rooftile", "int4-g32-minima"),
        ("k128_n64_m16", "rooftile", "int4-g128-invariant"),
        ("k128_n64_m16", "cublas", "fp16"),
        ("k256_n16_m1", "rooftile", "int4-g128"),
        ("k256_n16_m1", "cublas", "fp16"),
    ]
    assert [(n["case"], n["impl"]) for n in notes.left_out] == [("every case", "machete"), ("every case", "marlin")]
