#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the help texts of the built program into docs/cli.md, between the markers.
# Usage: tools/make_cli_docs.sh [PROGRAM]   (build/cpu-release/spin)
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:-build/cpu-release/spin}
[ -x "$program" ] || {
  echo "make_cli_docs: no program $program; run 'make build'" >&2
  exit 1
}
python3 - "$program" docs/cli.md <<'PYTHON'
import pathlib
import re
import subprocess
import sys

program, page = sys.argv[1], pathlib.Path(sys.argv[2])
text = page.read_text(encoding="utf-8")
for command in ("spin", "generate", "serve", "eval", "eval ruler", "eval ppl", "eval agreement", "inspect", "plan"):
    arguments = ["--help"] if command == "spin" else [*command.split(), "--help"]
    help_text = subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout
    block = f"<!-- help {command} -->\n```text\n{help_text}```\n<!-- end -->"
    pattern = re.compile(rf"<!-- help {command} -->.*?<!-- end -->", re.S)
    text, count = pattern.subn(lambda _: block, text)
    if count != 1:
        sys.exit(f"make_cli_docs: {page} needs exactly one block for {command}, has {count}")
page.write_text(text, encoding="utf-8")
PYTHON
