# SPDX-License-Identifier: Apache-2.0
"""Compiler launcher of the GPU sources: runs nvcc and keeps, beside the object, what the checks of the kernels read.

keep_reports.py nvcc ... -o NAME.o  ->  NAME.o.command (nvcc's arguments, one a line), NAME.o.ptxas (registers, spills,
shared memory, warnings of every kernel), NAME.o.<architecture>.ptx and NAME.o.<architecture>.cubin.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

command = sys.argv[1:]
target = Path(command[command.index("-o") + 1])
Path(f"{target}.command").write_text("\n".join(command), encoding="utf-8")
with tempfile.TemporaryDirectory() as kept:
    done = subprocess.run([*command, "--keep", "--keep-dir", kept], stderr=subprocess.PIPE, text=True)
    Path(f"{target}.ptxas").write_text(done.stderr, encoding="utf-8")
    targets = {ptx: re.search(r"\.target (\w+)", ptx.read_text()) for ptx in Path(kept).glob("*.ptx")}
    for cubin in Path(kept).glob("*.cubin"):  # NAME.compute_80.sm_80, NAME.compute_90a; NAME if there is one alone
        named = re.search(r"\.(?:compute|sm)_(\d+[a-z]?)$", cubin.stem)
        architecture = f"sm_{named[1]}" if named else targets[cubin.with_suffix(".ptx")][1]
        shutil.move(cubin, f"{target}.{architecture}.cubin")
    for ptx, architecture in targets.items():
        shutil.move(ptx, f"{target}.{architecture[1] if architecture else ptx.stem}.ptx")
# what ptxas reports of every kernel is no news to whoever builds
quiet = re.compile(r"^(ptxas info|ptxas <macro|\s+Function properties|\s+\d+ bytes stack frame)")
sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if not quiet.match(line))
sys.exit(done.returncode)
