# SPDX-License-Identifier: Apache-2.0
"""The extension needs no framework, no CUDA library and no libpython, exports its init function alone, and is small.

check_extension.py PATH/_C.abi3.so [--cuda]     --cuda: it holds GPU kernels, and the CUDA runtime linked into it
"""

import re
import subprocess
import sys
from pathlib import Path

LARGEST = (72 if "--cuda" in sys.argv else 8) << 20
PLATFORM = r"lib(stdc\+\+|gcc_s|c|m|dl|pthread|rt)\.so|ld-linux"
FRAMEWORKS = r"_ZN?K?(2at|3c10|5torch)|cuda[A-Z]|cu[A-Z][a-z]|nv[A-Z]|cublas|omp_|GOMP|__kmpc"


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


path = Path(sys.argv[1])
problems = []
needed = [m[1] for line in lines("readelf", "-d", path) if (m := re.search(r"NEEDED.*\[(.*)\]", line))]
problems += [f"needs the library {n}" for n in needed if not re.match(PLATFORM, n)]
undefined = [line.split()[-1] for line in lines("nm", "-D", "--undefined-only", path)]
problems += [f"needs the symbol {s}" for s in undefined if re.match(FRAMEWORKS, s)]
exported = {line.split()[-1]: line.split()[-2] for line in lines("nm", "-D", "--defined-only", path)}
# Weak and unique symbols (V, W, u) of the standard library and nanobind are in every C++ binary; ours are hidden.
problems += [
    f"exports {symbol}"
    for symbol, kind in exported.items()
    if symbol != "PyInit__C" and (kind not in "VWu" or "rooftile" in symbol)
]
if "PyInit__C" not in exported:
    problems.append("does not export PyInit__C")
if path.stat().st_size > LARGEST:
    problems.append(f"is {path.stat().st_size} bytes, more than {LARGEST}")
print("\n".join(f"{path.name} {p}" for p in problems) or f"{path.name}: {path.stat().st_size} bytes, needs {needed}")
sys.exit(bool(problems))
