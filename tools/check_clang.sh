#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles every unit of src/ and cli/ with clang 14, warnings and -Wthread-safety as errors, without
# generating code (the analysis needs none). Usage: tools/check_clang.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${1:-2}
cmake --preset cpu-clang -DSPIN_TESTS=OFF >/dev/null
python3 - "$jobs" <<'PY'
import json, shlex, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

entries = json.load(open("build/cpu-clang/compile_commands.json"))

def check(entry):
    words = shlex.split(entry["command"])
    if words[0].endswith("ccache"):
        words = words[1:]
    out = words.index("-o")
    words = words[:out] + words[out + 2:] + ["-fsyntax-only"]
    done = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True)
    return entry["file"], done.returncode, done.stderr

failed = 0
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    for name, code, text in pool.map(check, entries):
        if code != 0:
            failed += 1
            print(f"clang: {name}\n{text}", file=sys.stderr)
print(f"clang: {len(entries)} units, {failed} failed")
sys.exit(1 if failed else 0)
PY
