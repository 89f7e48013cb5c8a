# SPDX-License-Identifier: Apache-2.0
"""python/rooftile/_C.pyi says what the extension has. docs/contributing.md has the command that writes it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import rooftile

STUB = Path(rooftile.__file__).with_name("_C.pyi")


def test_the_stub_is_up_to_date(tmp_path):
    pytest.importorskip("nanobind")
    fresh = tmp_path / "_C.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-i", str(STUB.parents[1]), "-m", "rooftile._C"]
    subprocess.run([*command, "-o", str(fresh), "--exclude-values", "-D"], check=True, timeout=120)
    ours, theirs = (
        {ast.unparse(node) for node in ast.parse(path.read_text(encoding="utf-8")).body} for path in (STUB, fresh)
    )
    assert ours == theirs, f"only in the stub: {sorted(ours - theirs)}; not in it: {sorted(theirs - ours)}"
    assert STUB.with_name("py.typed").exists()


def test_every_name_in_the_stub_is_one():
    """No type that a checker could not resolve."""
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    known = {"dict", "str", "int", "float", "bool", "object", "list", "tuple", "None", "Ellipsis", "property"}
    known |= {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    known |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} <= known
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
