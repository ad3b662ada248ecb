#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header of ours compiles alone. Usage: tools/check_headers.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${1:-2}
check_one() {
  printf '#include "%s"\n' "$1" |
    g++ -std=c++20 -Wall -Wextra -Iinclude -Isrc -I. -fsyntax-only -x c++ - || { echo "does not compile alone: $1" >&2; return 1; }
}
export -f check_one
{
  (cd include && find . -name '*.h' -printf '%P\n')
  (cd src && find . -name '*.h' ! -path './backend/cuda/*' ! -name '*-inl.h' -printf '%P\n')
  find cli -name '*.h' 2>/dev/null || true
} | sort | xargs -P "$jobs" -I{} bash -c 'check_one {}'
echo "headers: all compile alone"
