# SPDX-License-Identifier: Apache-2.0
"""Every quoted #include follows the arrows of the architecture, and no folder includes what lies to its left:

python/src -> include;  ops -> kernels, cpu, core, include;  kernels -> tile, core, include;  cpu -> core, include;
tile -> core, include, CuTe;  core -> include;  include -> the standard library alone.
And every header of cpp/tile is included by a test of tests/cpp/tile.

check_includes.py ROOT            checks the tree; exits 1 with a line for each include that does not follow
check_includes.py ROOT --selftest plants faults in a copy of the tree and expects each to be found
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

ARROWS = {
    "python/src": {"rooftile"},
    "cpp/include": {"rooftile"},
    "cpp/core": {"core", "rooftile"},
    "cpp/tile": {"tile", "core", "rooftile", "cute", "cutlass"},
    "cpp/kernels": {"kernels", "tile", "core", "rooftile", "cute", "cutlass"},
    "cpp/cpu": {"cpu", "core", "rooftile"},
    "cpp/ops": {"ops", "kernels", "cpu", "core", "rooftile"},
    "cpp/ladder": {"ladder", "tile", "core", "rooftile", "cute", "cutlass"},
}
# Angle brackets: frameworks, and CUDA where code has to compile without it.
FOREIGN = {
    "python/src": r"torch|ATen|c10|cuda|cute|cutlass",
    "cpp/include": r"torch|ATen|c10|cuda|cute|cutlass|Python\.h|nanobind|immintrin",
    "cpp/core": r"torch|ATen|c10|Python\.h|nanobind",
    "cpp/tile": r"torch|ATen|c10|Python\.h|nanobind",
    "cpp/kernels": r"torch|ATen|c10|Python\.h|nanobind",
    "cpp/cpu": r"torch|ATen|c10|Python\.h|nanobind|cuda|cute|cutlass",
    "cpp/ops": r"torch|ATen|c10|Python\.h|nanobind|cute|cutlass",
    "cpp/ladder": r"torch|ATen|c10|Python\.h|nanobind",
}
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}


def wrong_includes(root):
    for folder, allowed in ARROWS.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(root)}:{number}"
                quoted = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
                angled = re.match(r"\s*#\s*include\s*<([^>]+)>", line)
                if quoted:
                    first, _, rest = quoted[1].partition("/")
                    if not rest:  # a neighbour: only the Python sources have no folder of their own under cpp/
                        if folder != "python/src" or not (path.parent / first).is_file():
                            yield f'{where}: "{quoted[1]}" is not written from cpp/'
                    elif first not in allowed:
                        yield f'{where}: {folder} must not include "{quoted[1]}"; it knows {", ".join(sorted(allowed))}'
                    elif path.suffix in {".h", ".cpp"} and quoted[1].endswith((".cuh", ".cu")):
                        yield f'{where}: "{quoted[1]}" holds device code, {path.name} does not'
                    elif folder == "cpp/cpu" and "/ref/" in str(path) and quoted[1].startswith("cpu/simd/"):
                        yield f"{where}: the reference must share no code with simd"
                elif angled and re.match(FOREIGN[folder], angled[1]):
                    yield f"{where}: {folder} must not include <{angled[1]}>"


def untested_headers(root):
    tests = "".join(path.read_text() for path in sorted((root / "tests/cpp/tile").glob("*.cu")))
    for path in sorted((root / "cpp/tile").iterdir()):
        if f'#include "tile/{path.name}"' not in tests:
            yield f"{path.relative_to(root)}: no test of tests/cpp/tile includes it"


def all_problems(root):
    yield from wrong_includes(root)
    yield from untested_headers(root)


def selftest(root):
    faults = {
        "cpp/include/rooftile/tensor.h": '#include "core/hd.h"',
        "cpp/core/half.h": '#include "cpu/kernels.h"',
        "cpp/cpu/kernels.h": "#include <cuda_runtime.h>",
        "cpp/cpu/ref/table.cpp": '#include "cpu/simd/vec.h"',
        "cpp/kernels/backend.h": '#include "ops/check.h"',
        "cpp/ops/check.h": '#include "tile/copy.cuh"',
        "python/src/module.cpp": '#include "cpu/kernels.h"',
        "python/src/bind.h": "#include <torch/extension.h>",
        "cpp/ops/norm.cpp": '#include "check.h"',
    }
    for name, line in faults.items():
        with tempfile.TemporaryDirectory() as copy:
            for folder in ("cpp", "python/src"):
                shutil.copytree(root / folder, Path(copy) / folder)
            file = Path(copy) / name
            file.write_text(file.read_text() + line + "\n")
            found = [w for w in wrong_includes(Path(copy)) if w.startswith(name)]
            if len(found) != 1:
                yield f"not found: {line} in {name}"
    with tempfile.TemporaryDirectory() as copy:
        for folder in ("cpp/tile", "tests/cpp/tile"):
            shutil.copytree(root / folder, Path(copy) / folder)
        (Path(copy) / "cpp/tile/new.cuh").write_text("#pragma once\n")
        if len(list(untested_headers(Path(copy)))) != 1:
            yield "not found: a header of cpp/tile without a test"


if __name__ == "__main__":
    check = selftest if "--selftest" in sys.argv else all_problems
    problems = list(check(Path(sys.argv[1])))
    print("\n".join(problems) or "every include follows the arrows")
    sys.exit(bool(problems))
