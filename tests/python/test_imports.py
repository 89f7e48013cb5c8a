# SPDX-License-Identifier: Apache-2.0
"""rooftile imports and works without torch, before torch, and without loading what it was not asked for."""

import ast
import graphlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rooftile as rt

WITHOUT = "import sys\nfor name in {names}: sys.modules[name] = None\n"


def run(code):
    """Runs `code` in a fresh interpreter that finds the same rooftile."""
    path = str(Path(rt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_import_loads_no_framework():
    loaded = run(
        "import rooftile, sys; rooftile.env()\n"
        "print([m for m in ('torch', 'jax', 'transformers', 'rich', 'gguf', 'ml_dtypes') if m in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.parametrize("names", [("torch",), ("torch", "jax", "transformers", "ml_dtypes", "rich", "gguf")])
def test_numpy_alone_is_enough(names):
    printed = run(
        WITHOUT.format(names=names) + "import numpy as np, rooftile as rt\n"
        "x = np.arange(12, dtype=np.float32).reshape(3, 4)\n"
        "y = rt.rms_norm(x)\n"
        "assert np.allclose(y, x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))\n"
        "c = rt.KVCache(1, 64, 2, 16, format='int8')\n"
        "q, k = np.ones((1, 2, 4, 16), np.float32), np.ones((1, 2, 2, 16), np.float32)\n"
        "t = np.ones((8, 8), np.float32)\n"
        "q = rt.rope_append(q, k, k, t, t, np.array([[0, 1]], np.int32), c)\n"
        "print(type(q).__module__, c.lengths, rt.env()['torch_exchange_table'])"
    )
    assert printed == "numpy [2] None"


def test_bfloat16_without_ml_dtypes_says_what_to_install():
    printed = run(
        WITHOUT.format(names=("ml_dtypes",)) + "from rooftile._arrays import numpy_dtype\n"
        "try: numpy_dtype('bfloat16')\n"
        "except ImportError as e: print(e)"
    )
    assert "pip install ml_dtypes" in printed


def test_torch_may_come_later():
    printed = run(
        "import numpy as np, rooftile as rt\n"
        "x = np.ones((2, 8), np.float32)\n"
        "a = rt.softmax(x)\n"
        "import torch\n"
        "b = rt.softmax(torch.from_numpy(x))\n"
        "c = torch.compile(rt.softmax, fullgraph=True, backend='eager')(torch.from_numpy(x))\n"
        "print(type(b).__name__, bool((b.numpy() == a).all()), torch.equal(b, c))"
    )
    assert printed == "Tensor True True"


def test_an_openmp_runtime_is_found_when_it_comes_later():
    pytest.importorskip("torch")
    backends = run(
        "from rooftile import _C\nbefore = [_C.parallel_backend() for _ in range(2)]\nimport torch\n"
        "print(*before, _C.parallel_backend(), sep=', ')"
    )
    assert backends == "rooftile, rooftile, openmp (shared)"


def imported(path, modules):
    """Modules of rooftile that a file imports, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rooftile":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def test_no_two_modules_import_each_other_even_late():
    """One pair is left out: quantize_ writes the RooftileConfig of a model, which rounds as quantize_ does."""
    folder = Path(rt.__file__).parent
    modules = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    below = {name: set(imported(path, modules)) - {name, "rooftile"} for name, path in modules.items()}
    below["rooftile.quantize"].remove("rooftile.integrations.quantizer")
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as circle:
        raise AssertionError(" <- ".join(circle.args[1])) from None


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm (Debian: apt-get install binutils)")
def test_the_extension_exports_its_initializer_alone():
    """What else it exported, such as a libstdc++ linked statically, was mixed with that of another extension."""
    library = rt._C.__file__
    said = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in said.splitlines()] == ["PyInit__C"]
