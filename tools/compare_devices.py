#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two results of `spin eval ruler`: the same prompts and settings on two devices.

Prints the settings whose right answers differ, by task, and those whose share of right tokens differs. Two
devices add in other orders, so an answer whose two likeliest tokens are close may go either way; the number
of such answers is what this prints, and --most bounds it.

Usage: tools/compare_devices.py ONE.json OTHER.json [--most N]
"""
import argparse
import json
import pathlib
import sys


def read(path):
    result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    if "settings" not in result or "prompts" not in result:
        sys.exit(f"{path} is no result of spin eval ruler")
    return result["prompts"], {setting["sparse"]: setting for setting in result["settings"]}


def tasks_that_differ(one, other):
    """Answers that only one of both has right, at least: the sum of differences by task."""
    names = sorted({*one["per_task"], *other["per_task"]})
    pairs = {name: (one["per_task"].get(name, [0])[0], other["per_task"].get(name, [0])[0]) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs=2, metavar="RESULT.json")
    parser.add_argument("--most", type=int, help="fail if more answers differ in any setting")
    arguments = parser.parse_args()
    (prompts, one), (other_prompts, other) = (read(path) for path in arguments.results)
    if prompts != other_prompts or set(one) != set(other):
        sys.exit("the results are of other prompts or other settings")
    worst, differing, tokens = 0, 0, 0
    for name in one:
        tasks = tasks_that_differ(one[name], other[name])
        tokens += one[name]["token_accuracy"] != other[name]["token_accuracy"]
        if not tasks:
            continue
        differing += 1
        count = sum(abs(a - b) for a, b in tasks.values())
        worst = max(worst, count)
        print(f"{name}: " + ", ".join(f"{task} {a} and {b}" for task, (a, b) in tasks.items()))
    print(f"{prompts} prompts, {len(one)} settings: the answers of {differing} differ, by at most {worst}; "
          f"the share of right tokens differs in {tokens}")
    return 1 if arguments.most is not None and worst > arguments.most else 0


if __name__ == "__main__":
    sys.exit(main())
