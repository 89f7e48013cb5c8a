#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel in split and in linked mode. Split: tag cp310-abi3, needed libraries from the platform only; installs
# and runs without torch on every CPython 3.10+ found. Linked: installs and runs on this Python.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s .venv/bin/python)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/split" \
  -C cmake.define.ROOFTILE_WERROR=ON .   # the flags of the presets, here and below: a compiler cache has the objects
wheel=$(ls "$work"/split/rooftile-*.whl)
case $wheel in *-cp310-abi3-*) ;; *) echo "expected a cp310-abi3 wheel, got $wheel"; exit 1 ;; esac

"$python" - "$wheel" "$work" <<'PY'
import re, subprocess, sys, zipfile
wheel, work = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    names = z.namelist()
    extension = [n for n in names if n.endswith(".so")]
    assert extension == ["rooftile/_C.abi3.so"], extension
    z.extract(extension[0], work)
needed = re.findall(r"NEEDED.*\[(.*)\]", subprocess.run(
    ["readelf", "-d", f"{work}/{extension[0]}"], check=True, capture_output=True, text=True).stdout)
allowed = ("libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "libdl.so", "libpthread.so", "ld-linux")
foreign = [n for n in needed if not n.startswith(allowed)]
assert not foreign, f"the extension needs {foreign}"
print(f"{wheel.rsplit('/', 1)[1]}: {len(names)} files, needs {', '.join(needed)}")
PY

smoke='import sys, numpy as np, rooftile as rt
assert "torch" not in sys.modules
y = rt.rms_norm(np.full((2, 8), 3, np.float32))
assert abs(y - 1).max() < 1e-6
print("python", sys.version.split()[0], "rooftile", rt.__version__, rt._C.binding_mode, "runs without torch")'

try_on() {   # python, wheel: in an environment without a pip of its own, which would take most of the time
  "$1" -m venv --without-pip "$work/venv" &&
    "$python" -m pip --python "$work/venv/bin/python" install -q --disable-pip-version-check "$2" &&
    "$work/venv/bin/python" -c "$smoke"
  rm -rf "$work/venv"
}
tried=0
for version in 3.10 3.11 3.12 3.13 3.14; do
  for interpreter in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python "$(command -v "python$version" || true)"; do
    if "$interpreter" -c 'import venv, ssl' 2>/dev/null; then
      try_on "$interpreter" "$wheel"
      tried=$((tried + 1))
      break
    fi
  done
done
[ "$tried" -gt 0 ] || try_on "$python" "$wheel"

"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/linked" \
  -C cmake.define.ROOFTILE_WERROR=ON -C cmake.define.ROOFTILE_LINKED=ON -C wheel.py-api="" .   # out of the same build: only the bindings are compiled again
try_on "$python" "$(ls "$work"/linked/rooftile-*.whl)"
echo "wheel checks passed"
