#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON of `spin eval` into the tables of docs/accuracy.md.

Rows are settings without their budget, columns budgets. A cell of `eval ruler` is the number of right
answers, of `eval agreement` top-1 agreement and KL, of `eval ppl` the perplexity relative to dense; attended
tokens per KV head and step and the hit ratio of the fast tier follow in parentheses.
Usage: accuracy_table.py RESULT.json...       the table, as Markdown
       accuracy_table.py --lines RESULT.json  KL by attended tokens, for plot_lines.py
       accuracy_table.py --sum RESULT.json... one result of `eval ruler` out of those of the same settings on
                                              different prompts, as JSON
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


def add(total, result):
    """Adds the answers to other prompts to `total`."""
    if [s["sparse"] for s in total["settings"]] != [s["sparse"] for s in result["settings"]]:
        sys.exit("the results are of different settings")
    for one, more in zip(total["settings"], result["settings"]):
        one["exact"] += more["exact"]
        for task, (right, of) in more["per_task"].items():
            before = one["per_task"].get(task, (0, 0))
            one["per_task"][task] = [before[0] + right, before[1] + of]
        one["token_accuracy"] = (one["token_accuracy"] * total["prompts"] + more["token_accuracy"] * result["prompts"]
                                 ) / (total["prompts"] + result["prompts"])
        use, other = one["use"], more["use"]
        for mean, weight in (("attended_tokens_per_head", "steps"), ("fast_share", "prompts")):
            count = use[weight] + other[weight]
            if count:
                use[mean] = (use[mean] * use[weight] + other[mean] * other[weight]) / count
        for key in ("prompts", "dense_prompts", "steps", "hits", "misses", "evictions", "fetched_bytes"):
            use[key] += other[key]
        for key in ("index_bytes", "mandatory_pages_per_head", "leased_pages_per_head"):
            use[key] = max(use[key], other[key])
        wanted = use["hits"] + use["misses"]
        use["hit_ratio"] = use["hits"] / wanted if wanted else 1.0
    for key in ("prompts", "prompt_tokens", "prefill_s", "decode_s"):
        total[key] += result[key]


def print_sum(paths):
    results = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            results.append(json.load(file))
        if any("exact" not in setting for setting in results[-1]["settings"]):
            sys.exit(f"{path}: not a result of `eval ruler`")
    for result in results[1:]:
        add(results[0], result)
    json.dump(results[0], sys.stdout, indent=1)


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
    paths = [a for a in sys.argv[1:] if a not in ("--lines", "--sum")]
    if not paths:
        sys.exit(__doc__)
    if "--sum" in sys.argv:
        print_sum(paths)
        return
    rows, dense = read(paths)
    if "--lines" in sys.argv:
        print_lines(rows)
    else:
        print_table(rows, dense)


if __name__ == "__main__":
    main()
