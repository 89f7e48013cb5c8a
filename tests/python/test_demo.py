# SPDX-License-Identifier: Apache-2.0
"""`rooftile demo` on a tiny random model: its report, its claims about kernels, its errors. No network."""

import argparse
import copy
import json
import math
import pathlib
import sys

import cases
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import rooftile as rt  # noqa: E402
from rich.console import Console  # noqa: E402
from rooftile import _results  # noqa: E402
from rooftile.cli import demo as command  # noqa: E402
from rooftile.demo import measure, report  # noqa: E402


class Letters:
    """A tokenizer of single bytes."""

    def __call__(self, text, verbose=True):
        return {"input_ids": list(text.encode())}

    def decode(self, ids):
        return bytes(int(i) % 128 for i in ids).decode()


def tiny_model(path, dtype, weights="dequantize", device="cpu"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=256, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.15)
    if weights == "w4a16":
        rt.quantize_(model, rt.W4A16(group_size=32))
    return model.to(device)


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    import rooftile.loaders

    monkeypatch.setattr(rooftile.loaders, "load_gguf", tiny_model)
    monkeypatch.setattr(rooftile.loaders, "load_tokenizer", lambda path: Letters())
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("".join(chr(97 + i * i % 23) if i % 7 else " " for i in range(4000)))
    return lambda *words: parser.parse_args(
        ["--model", "tiny.gguf", "--text", "words.txt", "--quick", "--prompt-tokens", "80", "--decode-tokens", "4",
         "--chunk-tokens", "64",
         "--picture", str(tmp_path / "demo.png"), "--json", str(tmp_path / "demo.json"), *words]
    )  # fmt: skip


def test_all_rows(arguments, tmp_path, capsys):
    assert command.run(arguments()) == 0
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == [v.name for v in (measure.YARDSTICK, *measure.VARIANTS)]
    # every format that a bf16 model's cache can have
    assert {row["format"] for row in rows.values()} == {None, *rt.KV_FORMATS} - {"fp32", "fp16"}
    printed = capsys.readouterr().out
    for name, row in rows.items():
        assert name in printed and row["prefill_tok_s"] > 0 and row["decode_tok_s"] > 0
        assert len(row["words"]) == 5
        assert bool(row["kernels"]) == (row["format"] is not None)
    bf16, int8, int4, kivi = (rows[f"{name}"] for name in ("bf16 cache", "int8 cache", "int4 cache", "int4-kivi"))
    assert bf16["quality"]["dnll"] == bf16["quality"]["kl"] == 0 and bf16["quality"]["top1"] == 1
    assert bf16["cache_bytes"] > 1.8 * int8["cache_bytes"] > int4["cache_bytes"]
    assert 0 < int8["quality"]["kl"] < int4["quality"]["kl"] and kivi["quality"]["kl"] < int4["quality"]["kl"]
    assert rows["W4A16"]["weight_bytes"] < bf16["weight_bytes"]
    assert rows["transformers sdpa"]["quality"] is None and rows["transformers sdpa"]["decode_speedup"] == 1
    assert figures["commit"] == (rt.env()["commit"] or rt.__version__) and figures["seconds"] > 0
    assert figures["machine"] == _results.machine("cpu")
    assert figures["run"]["torch_threads"] == torch.get_num_threads() and "Text: words.txt" in printed


MISSING = ("int4 cache", "int4-kivi-sym")


def as_on_a_gpu(figures):
    """A report as it would be on a GPU: kernels of other names, two formats as if they had none."""
    figures["machine"] = {"gpu": "NVIDIA H200"}
    figures["run"].update(device="cuda:0", native_variant=["cuda"], prompts="torch sdpa")
    for i, row in enumerate(figures["rows"]):
        if row["name"] in MISSING:
            names = ("name", "format", "weights")
            figures["rows"][i] = {**{n: row[n] for n in names}, "missing": "decode_attention: no GPU kernel"}
        else:
            row["kernels"] = ["_".join(["cuda", *kernel.split("_")[2:]]) for kernel in row["kernels"]]
    return figures


def shown(figures, width=120):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report.tables(figures))
    return capture.get()


def test_what_a_gpu_lacks_is_said(arguments, tmp_path):
    figures = as_on_a_gpu(command.measure(arguments()))
    assert measure.wrong_kernels(figures) == []
    text = shown(figures)
    for name in MISSING:
        lines = [line for line in text.splitlines() if line.startswith(f" {name} ") or line.startswith(f"{name} ")]
        assert len(lines) == 4 and all("not on cuda yet" in line for line in lines), name
    assert text.count("not on cuda yet") == 8
    assert "Prompts ran on torch's sdpa in every row" in " ".join(text.split())
    assert "NVIDIA H200" in text and "Kernels that ran (cuda)" in text and "threads" not in text
    report.draw(figures, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"
    figures["rows"][2]["kernels"].append("cpu_avx512_bfloat16_int8_d64")
    assert measure.wrong_kernels(figures) == [
        "int8 cache: cpu_avx512_bfloat16_int8_d64 ran, this machine's variant is cuda"
    ]


def test_one_long_bar_does_not_flatten_the_others(tmp_path, monkeypatch):
    """It is cut, with its figure beside it, and the panel says so; bars of like length are not."""
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    path = pathlib.Path(__file__).parents[2] / "bench" / "results" / "cpu-2c" / "demo.json"
    figures = json.loads(path.read_text())
    del figures["rows"][8:]
    for percents, reach, cut in (
        ([0, 0.3, 27.5, 1.25, 0.5, -0.5, 0.25], 1.25, ["+27.50 %"]),
        ([0, 0.3, 27.5, 1.25, 0.5, -0.5, 27.0], 27.5, []),
        ([0, 0.3, 900, 27.5, 0.5, -0.5, 1.0], 1.0, ["+900.00 %", "+27.50 %"]),
        ([0, 0, 0, 0, 0, 0, 0], 0, []),
    ):
        for row, percent in zip(figures["rows"][1:], percents, strict=True):
            row["quality"].update(percent=percent, percent_se=None)
        report.draw(figures, tmp_path / "a.png")
        axes = drawn[-1].axes[3]
        assert max(bar.get_width() for bar in axes.patches) == reach
        rows = {text.get_position()[1] for text in axes.texts if text.get_text() == "//"}
        assert [t.get_text() for t in axes.texts if t.get_position()[1] in rows and t.get_text() != "//"] == cut
        assert ("not to scale" in axes.get_title()) == bool(cut)


def test_a_cpu_row_says_nothing_of_gpus(arguments):
    text = shown(command.measure(arguments()))
    assert "sdpa in every row" not in text and "yet" not in text and f"{torch.get_num_threads()} threads" in text


@pytest.mark.skipif("cuda" not in cases.devices(), reason="no GPU, or a build without GPU kernels")
def test_on_a_gpu(arguments, tmp_path):
    """Every format that has a kernel runs on it; W4A16 too."""
    assert command.run(arguments("--device", "cuda")) == 0
    figures = json.loads((tmp_path / "demo.json").read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == [v.name for v in (measure.YARDSTICK, *measure.VARIANTS)]
    assert figures["run"]["device"] == "cuda:0" and figures["run"]["native_variant"] == ["cuda"]
    for name, row in rows.items():
        assert row["missing"] is None and row["decode_tok_s"] > 0 and len(row["words"]) == 5, name
    assert rows["bf16 cache"]["quality"]["kl"] == 0 < rows["int8 cache"]["quality"]["kl"]
    assert "cuda_bfloat16_int4-kivi_d64" in rows["W4A16 + int4-kivi"]["kernels"]


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(arguments, width, gpu):
    figures = command.measure(arguments())
    if gpu:
        figures = as_on_a_gpu(figures)
    lines = shown(figures, width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if "…" in line and "prompt ends" not in line] == []


def test_a_row_that_ran_something_else_is_an_error(arguments, monkeypatch):
    """Each fault of a real report is named."""
    figures = command.measure(arguments())
    assert measure.wrong_kernels(figures) == []
    names = [row["name"] for row in figures["rows"]]
    faults = {
        "transformers sdpa": ["cpu_reference_bf16_bf16"],
        "int8 cache": [k.replace("int8", "int4") for k in figures["rows"][names.index("int8 cache")]["kernels"]],
        "int4-kivi": ["_".join(["cpu", "reference", *k.split("_")[2:]]) for k in figures["rows"][5]["kernels"]],
        "W4A16": [k for k in figures["rows"][names.index("W4A16")]["kernels"] if "w4" not in k],
        "int4 cache": [],
        "int4-kivi-sym": [k for k in figures["rows"][4]["kernels"] if "append" in k],
        "bf16 cache": figures["rows"][names.index("W4A16")]["kernels"],
    }
    for name, kernels in faults.items():
        wrong = copy.deepcopy(figures)
        wrong["rows"][names.index(name)]["kernels"] = kernels
        assert all(text.startswith(name + ":") for text in measure.wrong_kernels(wrong)), name
        assert measure.wrong_kernels(wrong), name
    monkeypatch.setattr(command, "measure", lambda args: wrong)
    with pytest.raises(rt.DeviceError, match="bf16 cache"):
        command.run(arguments())


def test_measured_quality_is_the_models_own(arguments):
    """NLL and KL against logits computed by transformers alone, in float64."""
    model = tiny_model(None, "float32")
    chunks = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(3)).numpy()
    runners = [measure.Runner(measure.Variant(f, f), model) for f in ("fp32", "int4")]
    scores = measure.measure_quality(runners, chunks)
    fp32, int4 = (measure.quality_figures(score, scores[0]) for score in scores)
    model.set_attn_implementation("sdpa")
    ids = torch.as_tensor(chunks)
    with torch.no_grad():
        logp = model(ids).logits[:, :-1].double().log_softmax(-1)
    nll = -logp.gather(2, ids[:, 1:, None]).mean((1, 2))
    assert fp32["perplexity"] == pytest.approx(nll.mean().exp().item(), rel=1e-4)
    assert fp32["dnll"] == fp32["kl"] == 0 and fp32["top1"] == 1
    differences = scores[1].nll - nll.numpy()
    assert int4["dnll"] == pytest.approx(differences.mean(), rel=1e-2, abs=1e-4)
    assert int4["dnll_se"] == pytest.approx(abs(differences[0] - differences[1]) / 2, rel=1e-2, abs=1e-4)
    assert int4["percent"] == pytest.approx(100 * (math.exp(int4["dnll"]) - 1)) and int4["kl"] > 0


@pytest.mark.parametrize(
    ("words", "error", "names"),
    [
        (["--device", "cuda:99"], rt.RooftileError, "--device: device"),
        (["--device", "abacus"], rt.NotSupportedError, "--device: device 'abacus'"),
        (["--json", "nowhere/x.json"], rt.ArgumentError, "--json"),
        (["--prompt-tokens", "10000000"], rt.ArgumentError, "--text"),
        (["--chunk-tokens", "1"], rt.ArgumentError, "--chunk-tokens: expected at least 2"),
        (["--picture", "out.webm"], rt.ArgumentError, r"--picture out\.webm: expected .*png.*svg"),
    ],
)
def test_bad_arguments(arguments, words, error, names, monkeypatch):
    monkeypatch.setattr(measure, "measure_speed", None)  # refused before the work begins
    with pytest.raises(error, match=names):
        command.run(arguments(*words))


def test_one_file_for_one_thing(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", None)
    picture = str(tmp_path / "demo.png")
    with pytest.raises(rt.ArgumentError, match=r"--json .*: is \(or lies in\) --picture; expected another file"):
        command.run(arguments("--picture", picture, "--json", picture))
    text = tmp_path / "text.png"
    text.write_text("words")
    with pytest.raises(rt.ArgumentError, match=r"--picture .*: is \(or lies in\) --text; expected another file"):
        command.run(arguments("--picture", str(text), "--text", str(text)))
    assert text.read_text() == "words"


def test_without_matplotlib_nothing_begins(arguments, monkeypatch):
    monkeypatch.setattr(command, "measure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        command.run(arguments())


def test_bad_numbers_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit):
        arguments("--chunks", "0")
    assert "--chunks" in capsys.readouterr().err
