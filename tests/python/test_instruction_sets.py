# SPDX-License-Identifier: Apache-2.0
"""CPUs with other instructions than this one, emulated: rooftile imports, chooses what runs there and computes it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rooftile as rt

QEMU = shutil.which("qemu-x86_64")
# What QEMU emulates of each: AVX2 since 7.2, AVX-512 never, whatever a CPU's name promises.
CPUS = {"Nehalem": ("portable",), "Haswell": ("avx2", "portable"), "Skylake-Server": ("avx2", "portable")}

CODE = """
import sys
import numpy as np
import rooftile as rt
from rooftile import _C

rng = np.random.default_rng(0)
x = rng.integers(-3, 4, (3, 64)).astype(np.float32)
w = rng.integers(-3, 4, (5, 64)).astype(np.float32)
assert (rt.linear(x, w) == x @ w.T).all()
packed = rt.W4Weight.quantize(w, group_size=32)
assert np.allclose(rt.w4a16_matmul(x, packed), x @ np.asarray(packed.dequantize(dtype="float32")).T)
assert np.allclose(rt.rms_norm(x), x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))
cache = rt.KVCache(1, 64, 1, 64, format="int4-kivi", dtype="float32")
k = rng.standard_normal((1, 40, 1, 64)).astype(np.float32)
cache.append(k, k)
assert np.isfinite(rt.decode_attention(k[:, :1], cache)).all()
print(rt.env()["cpu"]["chosen"], *_C.cpu_variants().split(", "))
"""


@pytest.mark.slow
@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64 (Debian: apt-get install qemu-user)")
@pytest.mark.parametrize("cpu", CPUS)
def test_an_older_cpu(cpu):
    path = str(Path(rt.__file__).parents[1])
    done = subprocess.run(
        [QEMU, "-cpu", cpu, sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{CODE}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    chosen, *variants = done.stdout.split()
    assert chosen == variants[0] and variants == [*CPUS[cpu], "reference"], done.stdout
