#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What ROOFTILE_CUDA does where nvcc or the driver is missing, and that CMake says so. Configures only; needs no GPU, and
# leaves the case of a missing driver out where there is one.
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake=cmake
[ ! -x .venv/bin/cmake ] || cmake=$PWD/.venv/bin/cmake
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CUDACXX CUDA_HOME
CXX=$(command -v "${CXX:-c++}")
export CXX
mapfile -t with_nvcc < <(type -ap nvcc | xargs -r -n 1 dirname; echo /usr/local/cuda/bin)
no_nvcc=(-DCMAKE_IGNORE_PATH="$(IFS=';'; echo "${with_nvcc[*]}")")
touch "$work/nvcc"

# says STATUS WORDS OPTION...: configuring with these options ends like that and prints these words
says() {
  local expected=$1 words=$2 status=0
  shift 2
  rm -rf "$work/build"
  "$cmake" -S . -B "$work/build" -DROOFTILE_PYTHON=OFF "$@" >"$work/log" 2>&1 || status=1
  # CMake wraps the lines of an error
  if [ $status = "$expected" ] && tr -s ' \n' ' ' <"$work/log" | grep -qF "$words"; then
    echo "passed: $words"
    return
  fi
  cat "$work/log"
  echo "FAILED: expected status $expected and '$words' of $*"
  exit 1
}

says 0 "building the CPU library (ROOFTILE_CUDA=AUTO, no nvcc found)" -DROOFTILE_CUDA=AUTO "${no_nvcc[@]}"
if ldconfig -p | grep -q libcuda.so.1; then
  echo "left out: AUTO without a driver; there is one"
else
  says 0 "building the CPU library (ROOFTILE_CUDA=AUTO, no NVIDIA driver found)" -DROOFTILE_CUDA=AUTO -DROOFTILE_NVCC="$work/nvcc"
fi
says 0 "building the CPU library (ROOFTILE_CUDA=OFF)" -DROOFTILE_CUDA=OFF
says 1 "ROOFTILE_CUDA=ON, but nvcc was not found; put it on PATH, set CUDACXX, or use AUTO or OFF" -DROOFTILE_CUDA=ON "${no_nvcc[@]}"
says 1 'ROOFTILE_CUDA must be AUTO, ON or OFF, got "MAYBE"' -DROOFTILE_CUDA=MAYBE
