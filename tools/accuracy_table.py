#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON of `spin eval` into the tables of docs/accuracy.md.

Rows are settings without their budget, columns budgets. A cell of `eval ruler` is the number of right
answers, of `eval agreement` top-1 agreement and KL, of `eval ppl` the perplexity relative to dense; attended
tokens per KV head and step and the hit ratio of the fast tier follow in parentheses.
Usage: accuracy_table.py RESULT.json...       the table, as Markdown
       accuracy_table.py --lines RESULT.json  KL by attended tokens, for plot_lines.py
"""
import json
import math
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


def cell(setting, dense):
    """What a cell says of a setting."""
    use = setting["use"]
    behind = f"({use['attended_tokens_per_head']:.0f}; {100 * use['hit_ratio']:.0f} %)"
    if "exact" in setting:
        return f"**{setting['exact']}** {behind}"
    ratio = setting["perplexity"] / dense["perplexity"]
    return f"**{setting['agreement']:.3f}** {setting['divergence']:.4f} x{ratio:.3f} {behind}"


def read(paths):
    """Settings by name and budget, and the dense one."""
    rows, dense = {}, None
    for path in paths:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        for setting in result["settings"]:
            if setting["sparse"] == "dense":
                dense = setting
                continue
            name, budget = split(setting["sparse"])
            rows.setdefault(name, {})[budget] = setting
    return rows, dense


def print_table(rows, dense):
    columns = sorted({budget for cells in rows.values() for budget in cells}, key=order)
    if "exact" in dense:
        print(f"dense: {dense['exact']} of {sum(of for _, of in dense['per_task'].values())}\n")
    else:
        print(f"dense: perplexity {dense['perplexity']:.3f}\n")
    print("| setting | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, cells in rows.items():
        texts = [cell(cells[b], dense) if b in cells else "" for b in columns]
        print(f"| `{name}` | " + " | ".join(texts) + " |")


def print_lines(rows):
    lines = []
    for name, cells in rows.items():
        points = sorted([s["use"]["attended_tokens_per_head"], math.log10(s["divergence"])]
                        for s in cells.values())
        lines.append({"name": name, "points": points})
    json.dump({"title": "KL from dense attention by attended tokens",
               "x": "attended tokens per KV head and step", "y": "log10 of the mean KL",
               "log_x": False, "series": lines}, sys.stdout)


def main():
    paths = [a for a in sys.argv[1:] if a != "--lines"]
    if not paths:
        sys.exit(__doc__)
    rows, dense = read(paths)
    if "--lines" in sys.argv:
        print_lines(rows)
    else:
        print_table(rows, dense)


if __name__ == "__main__":
    main()
