# SPDX-License-Identifier: Apache-2.0
"""rt.env() says what is true of this machine, in three forms."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import rooftile as rt
import torch
from rooftile import _C
from rooftile.cli import env as command
from rooftile.cli import main
from rooftile.env import OPS, format_markdown, format_text


def test_facts():
    facts = rt.env()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["version"] == rt.__version__
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cpu"]["chosen"] == facts["cpu"]["variants"][0]
    assert facts["cpu"]["threads"] == _C.parallel_threads() >= 1


def test_torch_tensors_pass_through_the_table_that_env_reports(monkeypatch):
    """Where there is one, nobody asks a tensor for `__dlpack__`."""

    def refused(self, **options):
        raise RuntimeError("not this way")

    x = torch.ones(2, 4)
    monkeypatch.setattr(torch.Tensor, "__dlpack__", refused)
    try:
        rt.rms_norm(x, out=x)
        through_the_table = True
    except (RuntimeError, rt.RooftileError):
        through_the_table = False
    assert rt.env()["torch_exchange_table"] == through_the_table


def test_the_chosen_variant_is_the_one_that_runs():
    with rt.record_kernels() as ran:
        rt.rms_norm(torch.ones(2, 4))
    assert ran == [f"cpu_{rt.env()['ops']['rms_norm']['cpu']}_float32"]


def test_every_public_op_is_listed():
    functions = {name for name in rt.__all__ if callable(getattr(rt, name)) and name.islower()}
    no_kernel = {"accelerate", "env", "explain", "quantize_", "record_kernels", "set_kv_cache", "warmup"}
    assert functions - no_kernel <= set(OPS)


def test_text_and_markdown_hold_every_fact():
    facts = rt.env()
    for text in (format_text(facts), format_markdown(facts)):
        for word in (facts["version"], facts["cpu"]["model"], facts["gpu"]["backend"], *OPS, *facts["packages"]):
            assert str(word) in text
    widths = {line.index(facts["cpu"]["chosen"]) for line in format_text(facts).splitlines()[-len(OPS) :]}
    assert len(widths) == 1
    facts["packages"]["jax"] = facts["commit"] = facts["torch_exchange_table"] = None
    assert "not installed" in format_text(facts) and "None" not in format_text(facts) + format_markdown(facts)


@pytest.mark.parametrize("options", [[], ["--markdown"], ["--json"]])
def test_command(options, capsys, tmp_path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(options)) == 0
    printed = capsys.readouterr().out
    facts = rt.env()
    if options == ["--json"]:
        assert json.loads(printed) == facts
        file = tmp_path / "env.json"
        assert command.run(parser.parse_args(["--json", str(file)])) == 0
        assert json.loads(file.read_text()) == facts
    else:
        assert printed.strip() == (format_markdown if options else format_text)(facts)


def test_a_file_that_cannot_be_written(capsys):
    assert main(["env", "--json", "no/such/folder/a.json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rooftile env: error: --json no/such/folder/a.json: the folder")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libcudart.so: cannot open shared object file")])
def test_a_torch_that_cannot_be_imported(error, monkeypatch, capsys):
    class Broken:
        def find_spec(self, name, *_):
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert main(["env"]) == 0
    assert f"torch                   {importlib.metadata.version('torch')}" in capsys.readouterr().out


def test_a_gpu_that_cannot_be_used(monkeypatch):
    def broken(index):
        raise RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    facts = rt.env()
    assert facts["gpu"]["devices"] == [{"error": "CUDA error: system not yet initialized"}]
    assert "gpu 0                   CUDA error: system not yet initialized" in format_text(facts)


@pytest.mark.parametrize("cores", range(1, min(3, len(os.sched_getaffinity(0))) + 1))
def test_threads_are_the_cores_that_the_process_may_use(cores):
    allowed = set(sorted(os.sched_getaffinity(0))[:cores])
    code = f"import os; os.sched_setaffinity(0, {allowed}); from rooftile import _C; print(_C.parallel_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == cores
