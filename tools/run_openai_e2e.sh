#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts `spin serve` on a free port and runs tests/e2e/test_openai_client.py against it.
#   tools/run_openai_e2e.sh [SPIN_PROGRAM [MODEL]]
# The `openai` package comes from PyPI into build/venv-openai on the first run.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:-build/cpu-release/spin}
model=${2:-models/needle-29m}
venv=build/venv-openai
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q openai || { echo "cannot install openai: offline?" >&2; exit 1; }
fi
log=$(mktemp)
"$program" serve --model "$model" --host 127.0.0.1 --port 0 --chat-format chatml 2>"$log" >>"$log" &
server=$!
stop_server() {
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  rm -f "$log"
}
trap stop_server EXIT
url=
for _ in $(seq 300); do
  url=$(grep -oE 'http://127\.0\.0\.1:[0-9]+' "$log" | head -1 || true)
  if [ -n "$url" ] && "$venv/bin/python" - "$url/health" <<'PY' 2>/dev/null; then break; fi
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=2)
PY
  if ! kill -0 "$server" 2>/dev/null; then
    echo "the server ended:" >&2
    cat "$log" >&2
    exit 1
  fi
  sleep 0.1
done
if [ -z "$url" ]; then
  echo "the server printed no address:" >&2
  cat "$log" >&2
  exit 1
fi
"$venv/bin/python" tests/e2e/test_openai_client.py "$url/v1"
