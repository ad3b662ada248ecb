#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy 14 over src/ and cli/ with the checks of .clang-tidy.
# Usage: tools/check_tidy.sh [FILE...]   (no file: all; takes long)
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset cpu-clang -DSPIN_TESTS=OFF >/dev/null
files=("$@")
if [ ${#files[@]} -eq 0 ]; then mapfile -t files < <(find src cli -name '*.cc' | sort); fi
printf '%s\n' "${files[@]}" | xargs -P "${JOBS:-2}" -n 4 clang-tidy-14 -p build/cpu-clang --quiet
echo "tidy: ${#files[@]} files clean"
