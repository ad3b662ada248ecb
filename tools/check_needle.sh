#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The retrieval model answers two prompts a task at 1K, 4K and 8K as the dense reference does.
# Needs build/cpu-release/spin (make build). Usage: tools/check_needle.sh
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 tools/eval_ruler.py --lengths 1k,4k,8k --per-task 2
