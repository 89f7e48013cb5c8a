# SPDX-License-Identifier: Apache-2.0
"""What takes long shows a bar on a terminal, and a line now and then anywhere else."""

import io

import numpy as np
import pytest
from rich.console import Console
from rooftile import _progress

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rooftile as rt  # noqa: E402
from rooftile import evaluate  # noqa: E402


def load(tmp_path, **options):
    pytest.importorskip("gguf")
    import tiny_gguf
    from rooftile.loaders import load_gguf

    load_gguf(tiny_gguf.write(tmp_path / "tiny.gguf"), **options)


def quantize(tmp_path, **options):
    rt.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 16)), rt.W4A16(group_size=32), **options)


def score(tmp_path, **options):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config).eval()
    evaluate.compare([evaluate.Variant("base", model)], np.zeros((1, 4), np.int64), **options)


WORK = {"Loading tiny.gguf": load, "Quantising": quantize, "Scoring": score}


@pytest.fixture
def terminal(monkeypatch):
    """What is written to stderr; terminal.forced says whether it is a terminal."""
    written = io.StringIO()
    written.forced = True
    console = lambda *, stderr: stderr and Console(file=written, force_terminal=written.forced, width=80)  # noqa: E731
    monkeypatch.setattr(_progress, "Console", console)
    return written


@pytest.mark.parametrize("description", WORK)
def test_on_a_terminal(terminal, tmp_path, description):
    WORK[description](tmp_path)
    assert description in terminal.getvalue() and "━" in terminal.getvalue()


@pytest.mark.parametrize(
    ("unit", "total", "line"),
    [("count", 40, "Working: 19 of 40, 10 s"), ("count", None, "Working: 19, 10 s"),
     ("bytes", 40 << 20, "Working: 19.0 of 40.0 MiB, 10 s")],
)  # fmt: skip
def test_lines_where_there_is_no_terminal(terminal, monkeypatch, unit, total, line):
    """One at most every SECONDS, none for what is quick; [names] are no markup."""
    terminal.forced = False
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    with _progress.progress_bar("Working", total, unit=unit) as advance:
        for _ in range(20):
            now[0] += 0.55
            advance(1 << 20 if unit == "bytes" else 1)
    assert terminal.getvalue().splitlines() == [line]
    with _progress.progress_bar("[b]", None) as advance:
        for _ in range(3):
            now[0] += 10
            advance()
    assert terminal.getvalue().splitlines()[1:] == ["[b]: 1, 10 s", "[b]: 2, 20 s", "[b]: 3, 30 s"]
    terminal.truncate(0)
    with _progress.progress_bar("Working", 2, show=False) as advance:
        now[0] += 100
        advance()
    assert terminal.getvalue().strip("\0") == ""


@pytest.mark.parametrize("description", WORK)
def test_not_where_nobody_looks(terminal, tmp_path, capfd, description):
    WORK[description](tmp_path, progress=False)
    assert terminal.getvalue() == ""
    terminal.forced = False
    WORK[description](tmp_path)
    assert terminal.getvalue() == "" and capfd.readouterr().out == ""
