#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a preset with the tools of .venv and runs its C++ tests. GoogleTest is installed where it is missing and this is
# root with apt-get; where it stays missing, the last words say so.
#
# usage: tests/cpp/run.sh PRESET [--build | --strict] [-DNAME=VALUE ...]
#   --build   build only
#   --strict  no GoogleTest is an error
#   -D        a variable of CMake, in place of the preset's
set -euo pipefail
cd "$(dirname "$0")/../.."
preset=$1 option="" variables=()
for argument in "${@:2}"; do
  case $argument in
    -D*) variables+=("$argument") ;;
    *) option=$argument ;;
  esac
done
bin=$PWD/.venv/bin
install="apt-get install -y libgtest-dev"

configure() {
  "$bin/cmake" --preset "$preset" -DPython_EXECUTABLE="$bin/python" -DCMAKE_MAKE_PROGRAM="$bin/ninja" "${variables[@]}"
}
has_googletest() { grep -qx 'ROOFTILE_GTEST:INTERNAL=ON' "build/$preset/CMakeCache.txt"; }

configure
if ! has_googletest && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "GoogleTest is missing: $install"
  if apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install -qq; then configure; fi
fi
"$bin/cmake" --build --preset "$preset"
[ "$option" != --build ] || exit 0
"$bin/ctest" --preset "$preset" --parallel "$(nproc)"
if ! has_googletest; then
  printf '%s\n' "" \
    "############################################################" \
    "THE C++ TESTS DID NOT RUN: GoogleTest is missing. On Debian:" \
    "    sudo $install" \
    "############################################################" >&2
  [ "$option" != --strict ] || exit 1
fi
