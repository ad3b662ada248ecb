#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds spin, fetches SmolLM2-135M-Instruct and lets it answer a question about the Book of Esther
# (7,362 tokens with the question), streaming; then prints tokens/s, time to first token and memory.
# Usage: tools/demo.sh [FURTHER FLAGS OF spin generate]
set -euo pipefail
cd "$(dirname "$0")/.."

tools/install_deps.sh demo
# An existing build folder keeps its settings; a new one leaves the tests out, which need more packages.
[ -f build/cpu-release/CMakeCache.txt ] || cmake --preset cpu-release -DSPIN_TESTS=OFF >/dev/null
cmake --build --preset cpu-release --target spin
model=$(tools/fetch_smollm2.sh)

echo "Text:     demo/esther.txt ($(wc -w <demo/esther.txt) words)" >&2
cat demo/question.txt >&2
printf '\n\n' >&2
cat demo/esther.txt demo/question.txt |
  build/cpu-release/spin generate --model "$model" --chat --temperature 0 --max-tokens 128 "$@"
