#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel with GPU kernels, out of the tree that preset `cuda` has built (nothing is compiled twice): at most 40 MB, no
# CUDA library needed, imports and computes on a machine without a driver, and says what it could run.
#
# usage: tests/packaging/check_cuda_wheel.sh [TARGETS]    what that tree was built for; without it, every architecture
set -euo pipefail
cd "$(dirname "$0")/../.."
targets=${1:-sm_80, compute_80, sm_90a}
python=$(realpath -s .venv/bin/python)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip install -q --disable-pip-version-check "scikit-build-core>=1.1"
touch "$work/start"
"$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work" \
  -C build-dir=build/cuda -C cmake.define.ROOFTILE_CUDA=ON -C cmake.define.ROOFTILE_INPLACE=OFF \
  -C cmake.define.Python_EXECUTABLE="$python" .
again=$(find build/cuda -name '*.cu.o' -newer "$work/start")
[ -z "$again" ] || { printf 'compiled a second time:\n%s\n' "$again"; exit 1; }
wheel=$(ls "$work"/rooftile-*.whl)
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le $((40 << 20)) ] || { echo "$wheel has $bytes bytes, more than 40 MB"; exit 1; }

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check "$wheel"
"$work/venv/bin/python" - "$targets" <<'PY'
import sys

import numpy as np
import rooftile as rt

assert rt._C.gpu_backend() == sys.argv[1], rt._C.gpu_backend()
assert abs(rt.rms_norm(np.full((2, 8), 3, np.float32)) - 1).max() < 1e-6
try:
    rt.KVCache(1, 64, 1, 64, device="cuda")
except (rt.NotSupportedError, rt.DeviceError) as e:
    print("without a GPU:", e)
else:
    raise SystemExit("a cache on a GPU that is not there")
rt.warmup()   # nothing to do here
PY
echo "CUDA wheel: $bytes bytes"
