# SPDX-License-Identifier: Apache-2.0
"""Every header compiles alone, twice in one file, with warnings as errors: the public ones with nothing but cpp/include
in the search path, the others with cpp/ as well, and those that include CUDA's only where CUDA is.

check_headers.py ROOT COMPILER [CUDA_INCLUDE]
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

root, compiler, cuda = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
public = sorted((root / "cpp/include").rglob("*.h"))
private = [h for folder in ("core", "kernels", "ops") for h in sorted((root / "cpp" / folder).rglob("*.h"))]
private += sorted((root / "cpp/cpu").glob("*.h"))  # simd/ is compiled once for each instruction set, by its own sources


def needs_cuda(header):
    text = header.read_text()
    own = (root / "cpp" / name for name in re.findall(r'#include "((?!rooftile/)[^"]+)"', text))
    return bool(re.search(r"#include <cuda", text)) or any(needs_cuda(h) for h in own)


if not cuda:
    private = [h for h in private if not needs_cuda(h)]
failed = False
with tempfile.TemporaryDirectory() as work:
    for header in public + private:
        base = root / ("cpp/include" if header in public else "cpp")
        source = Path(work) / "alone.cpp"
        source.write_text(f'#include "{header.relative_to(base)}"\n' * 2)
        paths = ["-I", root / "cpp/include"] + ([] if header in public else ["-I", root / "cpp"])
        paths += [part for folder in cuda for part in ("-isystem", folder)]
        command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *paths, source]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            failed = True
            print(f"{header.relative_to(root)} does not compile alone:\n{result.stderr}")
print(f"{len(public)} public and {len(private)} other headers")
sys.exit(failed)
