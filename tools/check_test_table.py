#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the table of failure cases in docs/failure_cases.md: every test it names exists.

A row is `| id | what happens | tests or the reason |`; tests are `Suite.Name` in backquotes.
Usage: tools/check_test_table.py; exit status 0 when every named test is found in tests/ and no id
stands twice.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFINED = re.compile(r"\b(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+)\s*,\s*(\w+)\s*\)")
NAMED = re.compile(r"`([A-Z]\w*)\.(\w+)`")


def main():
    defined = set()
    for path in (ROOT / "tests").rglob("*.cc"):
        defined.update(DEFINED.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "tests").rglob("*.h"):
        defined.update(DEFINED.findall(path.read_text(encoding="utf-8")))
    errors, ids, named = [], set(), 0
    for line in (ROOT / "docs/failure_cases.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 3 or not re.fullmatch(r"[A-Z]-?\d+", cells[0]):
            continue
        if cells[0] in ids:
            errors.append(f"{cells[0]} stands twice")
        ids.add(cells[0])
        for test in NAMED.findall(cells[2]):
            named += 1
            if test not in defined:
                errors.append(f"{cells[0]}: no test {test[0]}.{test[1]}")
    for error in errors:
        print(error, file=sys.stderr)
    print(f"failure cases: {len(ids)} rows, {named} tests named, {len(errors)} errors")
    return 1 if errors or not ids else 0


if __name__ == "__main__":
    sys.exit(main())
