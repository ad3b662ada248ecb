#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need a GPU and, with --sanitize, once more under compute-sanitizer's memcheck,
# initcheck, synccheck and racecheck. Build first:
#   cmake --preset cuda-release && cmake --build --preset cuda-release --target spin_backend_cuda_tests \
#     spin_kv_cuda_tests
# The sanitizers take the store's model test with 2,000 operations.
# Usage: tools/check_gpu.sh [--sanitize] [FOLDER_OF_TEST_PROGRAMS] [-- GTEST_FLAGS]
set -euo pipefail
cd "$(dirname "$0")/.."

sanitize=0
folder=build/cuda-release/tests
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=1 ;;
    --) shift && break ;;
    *) folder=$1 ;;
  esac
  shift
done
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
failed=0
programs=("$folder/spin_backend_cuda_tests" "$folder/spin_kv_cuda_tests")
for program in "${programs[@]}"; do "$program" --gtest_brief=1 "$@" || failed=1; done
if [ "$sanitize" = 1 ]; then
  for tool in memcheck initcheck synccheck racecheck; do
    echo "== compute-sanitizer $tool"
    filter='*'
    # racecheck takes the barriers of cuBLASLt's kernels for races, or fails in them; it needs minutes.
    [ "$tool" = racecheck ] && filter='-*OpsConformance.Matmul*:*OpsConformance.Pack*:*OpsConformance.Embedding*'
    for program in "${programs[@]}"; do
      SPIN_MODEL_OPERATIONS=2000 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$program" --gtest_brief=1 --gtest_filter="$filter" || failed=1
    done
  done
fi
exit $failed
