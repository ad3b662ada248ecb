#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON of `spin eval ruler` into the table of docs/accuracy.md.

Rows are settings without their budget, columns budgets; a cell is the number of right answers, with the
attended tokens per KV head and step behind it. Usage: accuracy_table.py RESULT.json...
"""
import json
import re
import sys

# Options that are the algorithm's defaults and say nothing in a table.
DEFAULTS = {
    "oracle": {"sinks=4", "local=64", "aggregate=max"},
    "streaming": {"sinks=4"},
    "quest": {"block=16", "sinks=4", "local=64", "aggregate=max"},
    "shadowkv": {"block=8", "sinks=4", "local=32", "aggregate=max"},
    "shadowkv-svd": {"block=8", "sinks=4", "local=32", "aggregate=max", "outliers=48"},
    "retroinfer": {"cluster=16", "update=1024", "iterations=9"},
    "seer": {"gates=auto", "local=32", "local=64", "position=first", "threshold=0", "dense_layers=0"},
    "sketch": {"sinks=4", "local=64", "offset=1024"},
}


def split(setting):
    """("sketch:bits=2", "128") of a resolved setting."""
    name, _, options = setting.partition(":")
    budget = "default"
    kept = []
    for option in filter(None, options.split(",")):
        if option.startswith("budget="):
            budget = option[len("budget="):]
        elif option not in DEFAULTS.get(name, ()):
            kept.append(option)
    return (f"{name}:{','.join(kept)}" if kept else name), budget


def order(budget):
    number = re.match(r"[\d.]+", budget)
    return (budget.endswith("%"), float(number.group()) if number else 0)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    rows, budgets, dense = {}, set(), None
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        for setting in result["settings"]:
            if setting["sparse"] == "dense":
                dense = setting
                continue
            name, budget = split(setting["sparse"])
            budgets.add(budget)
            use = setting["use"]
            rows.setdefault(name, {})[budget] = (
                setting["exact"], use["attended_tokens_per_head"], use["hit_ratio"])
    columns = sorted(budgets, key=order)
    total = sum(of for _, of in dense["per_task"].values())
    print(f"dense: {dense['exact']} of {total}\n")
    print("| setting | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, cells in rows.items():
        texts = []
        for budget in columns:
            if budget not in cells:
                texts.append("")
                continue
            exact, attended, hits = cells[budget]
            texts.append(f"**{exact}** ({attended:.0f}; {100 * hits:.0f} %)")
        print(f"| `{name}` | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
