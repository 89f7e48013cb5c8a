# SPDX-License-Identifier: Apache-2.0
"""The table of faults fits the kernels as they are; that tests find the faults is seen on a GPU."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
TOOL = TREE / "tests" / "planted_faults.py"
_spec = importlib.util.spec_from_file_location("planted_faults", TOOL)
planted_faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(planted_faults)


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("name", planted_faults.FAULTS)
def test_every_fault_has_its_place(name):
    fault = planted_faults.FAULTS[name]
    assert planted_faults.places(fault, TREE) == 1 and fault.sound != fault.faulty


def test_a_fault_is_planted_in_a_copy_alone(tmp_path):
    name, fault = next(iter(planted_faults.FAULTS.items()))
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    shutil.copy(TREE / fault.file, copy)
    assert run("--apply", name, tmp_path).returncode == 0
    assert copy.read_text() == (TREE / fault.file).read_text().replace(fault.sound, fault.faulty)
    again = run("--apply", name, tmp_path)
    assert again.returncode != 0 and "expected once" in again.stderr
    assert "very tree" in run("--apply", name, TREE).stderr
    assert "no fault" in run("--apply", "nothing", tmp_path).stderr
    assert all(name in run("--list").stdout for name in planted_faults.FAULTS)
