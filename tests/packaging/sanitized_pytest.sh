#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Python tests of what reads callers' memory and files, with the extension of preset `sanitize` (built before) under ASan
# and UBSan: arguments, overlap, caches, weights, sizes, DLPack, loaders. Arguments: pytest's, in place of the selection.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s .venv/bin/python)
tree=$PWD/build/sanitize/tree
rm -rf "$tree"
mkdir -p "$tree"
cp -r python/rooftile "$tree"
rm -f "$tree"/rooftile/_C*.so
.venv/bin/cmake --install build/sanitize --prefix "$tree" >/dev/null

tests=(
  tests/python/test_arrays.py
  tests/python/test_dlpack.py
  tests/python/test_empty.py
  tests/python/test_kv_cache.py
  tests/python/test_kv_cache_arguments.py
  tests/python/test_kv_cache_paged.py
  tests/python/test_limits.py
  tests/python/test_many_rows.py
  tests/python/test_merge_attention.py
  tests/python/test_poison.py
  tests/python/test_sizes.py
  tests/python/test_w4a16_modules.py
  tests/python/test_workspaces.py
  tests/python/test_gguf.py
  tests/python/test_checkpoints_refused.py
)
# Under ASan a test can neither limit its address space nor count its memory;
not_here=(
  tests/python/test_limits.py::test_threads_that_cannot_be_made_are_done_without
  tests/python/test_dlpack.py::test_memory_stays_flat
)

# The runtime comes first, before Python and torch allocate. Python keeps memory until it ends: no leaks are looked for.
runtime=$("${CXX:-c++}" -print-file-name=libasan.so)
sanitized() {
  LD_PRELOAD="$runtime $("${CXX:-c++}" -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$tree" \
    "$python" "$@"
}
pytest() { sanitized -m pytest -q -p no:cacheprovider -m "not slow" -n logical --dist worksteal "$@"; }

# A view that lies about its memory is read past its end, and that is seen: this is the extension, and ASan is awake.
past_the_end='import numpy as np, rooftile as rt
rt.rms_norm(np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 64), (256, 4)))'
report=$(sanitized -c "$past_the_end" 2>&1) && { echo "ASan saw nothing of a read past the end"; exit 1; }
grep -q "ERROR: AddressSanitizer" <<<"$report" || { echo "$report"; exit 1; }

if [ $# -gt 0 ]; then
  pytest "$@"
else
  pytest "${tests[@]}" "${not_here[@]/#/--deselect=}"
  # Of the bad inputs one op of each kind
  pytest tests/python/test_bad_input.py -k "float32 and (rms_norm or rope_append or W4Weight or merge or int8)"
fi
