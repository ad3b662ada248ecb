#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what the repository says about the world around it.

Tracked text names no absolute path of a machine, no unfinished place, no file above the size limit,
and every relative link in a Markdown file leads somewhere. Usage: tools/check_text.py; exit 0 when clean.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
LARGE_ALLOWED = ("models/",)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|root|home/\w+)/")
UNFINISHED = re.compile(r"\b(?:FIXME|XXX:|TODO(?!\(#\d+\)))")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def tracked():
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    return [name for name in out.stdout.decode().split("\0") if name]


def main():
    errors = []
    for name in tracked():
        path = ROOT / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_BYTES and not name.startswith(LARGE_ALLOWED):
            errors.append(f"{name}: {path.stat().st_size} bytes, at most {MAX_BYTES}")
        data = path.read_bytes()
        if b"\0" in data[:4096] or name == "tools/check_text.py":
            continue
        text = data.decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                errors.append(f"{name}:{number}: a path of one machine")
            if path.suffix in (".cc", ".h", ".py", ".sh", ".cmake") and UNFINISHED.search(line):
                errors.append(f"{name}:{number}: an unfinished place")
        if path.suffix == ".md":
            for target in LINK.findall(text):
                if "://" not in target and not (path.parent / target).exists():
                    errors.append(f"{name}: dead link {target}")
    for error in errors:
        print(error, file=sys.stderr)
    print(f"text: {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
