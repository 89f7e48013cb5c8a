# SPDX-License-Identifier: Apache-2.0
"""The products that GPUs other than Hopper take are there for every architecture from 8.0 on but sm_90a, also for those
that the build does not compile for: PTX of Hopper without its own instructions has their loop.

check_fallback.py FOLDER     FOLDER holds what keep_reports.py left beside the objects of cpp/kernels
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

command = next(Path(sys.argv[1]).rglob("multistage.cu.o.command")).read_text().splitlines()
kept = [part for part in command if not re.match(r"--?(gencode|generate-code|arch|MD|MP)\b", part)]
for option in ("-o", "-MF", "-MT", "-c", "-x"):
    while option in kept:
        at = kept.index(option)
        del kept[at : at + (1 if option == "-c" else 2)]
source = next(part for part in kept if part.endswith(".cu"))
with tempfile.TemporaryDirectory() as work:
    ptx = Path(work) / "multistage.ptx"
    subprocess.run([*kept, "-arch=compute_90", "-ptx", "-o", ptx], check=True, stdin=subprocess.DEVNULL)
    text = ptx.read_text()
kernels = re.findall(r"(?s)\.entry \S*linear_multistage_tiles.*?\n\}", text)
empty = [kernel.splitlines()[0] for kernel in kernels if "mma.sync" not in kernel]
print("\n".join(empty) or f"{len(kernels)} kernels of {Path(source).name} for compute_90")
sys.exit(bool(empty) or not kernels)
