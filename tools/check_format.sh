#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All C++ files are formatted by clang-format 14 (another version prints another result).
# Usage: tools/check_format.sh [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(--dry-run -Werror)
[ "${1:-}" = "--fix" ] && mode=(-i)
git ls-files -z --cached --others --exclude-standard -- '*.cc' '*.h' '*.cu' '*.cuh' |
  xargs -0 -r clang-format-14 "${mode[@]}"
echo "format: clean"
