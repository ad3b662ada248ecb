#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the libFuzzer targets and runs each for a while on its generated seeds.
# Usage: tools/run_fuzzers.sh [SECONDS_EACH] [TARGET...]
# A crash leaves its input under build/fuzz/inputs/TARGET and ends the script with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}
shift || true
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
python3 tools/make_fuzz_corpus.py --out build/fuzz/corpus
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  for binary in build/fuzz/fuzz/*_fuzzer; do targets+=("$(basename "$binary" _fuzzer)"); done
fi
passed=0
failed=0
run_one() {
  local target=$1 inputs=build/fuzz/inputs/$1
  mkdir -p "$inputs" "build/fuzz/corpus/$target"
  # Two limits: no input may make a reader take long or ask for much more than the input holds.
  "build/fuzz/fuzz/${target}_fuzzer" "$inputs" "build/fuzz/corpus/$target" \
    -max_total_time="$seconds" -timeout=5 -rss_limit_mb=1024 -malloc_limit_mb=256 \
    -max_len=65536 -artifact_prefix="$inputs/" -print_final_stats=1 >"build/fuzz/$target.log" 2>&1
}
for target in "${targets[@]}"; do
  if run_one "$target"; then
    passed=$((passed + 1))
    echo "fuzz $target: clean, $(grep -o 'number_of_executed_units: [0-9]*' "build/fuzz/$target.log" | tail -1)"
  else
    failed=$((failed + 1))
    echo "fuzz $target: FAILED, see build/fuzz/$target.log"
    tail -30 "build/fuzz/$target.log"
  fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
