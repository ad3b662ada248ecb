#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exact match of models/needle-29m on the RULER-like prompts of tests/data/ruler, beside the counts
of the dense reference.

A task passes when it gets at most one prompt more wrong than the reference does over all prompts of
the task. With --per-task N only the first N prompts of each task run.

Usage: tools/eval_ruler.py [--lengths 1k,4k,8k] [--per-task N] [--dtype float32] [--json FILE]
Ends with "N passed, M failed", counting tasks; exit status 0 when none failed.
"""
import argparse
import gzip
import json
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from spin_server import SpinServer

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load(length, per_task):
    """{task: [prompt records]} in file order, at most per_task each (0: all)."""
    tasks = {}
    with gzip.open(ROOT / f"tests/data/ruler/ruler_{length}.jsonl.gz", "rt", encoding="utf-8") as f:
        for line in f:
            record = json.loads(line)
            rows = tasks.setdefault(record["task"], [])
            if per_task == 0 or len(rows) < per_task:
                rows.append(record)
    return tasks


def answers_exactly(server, record):
    answer = server.post("/v1/completions", {
        "prompt": record["prompt"], "temperature": 0, "max_tokens": len(record["answer_ids"]) + 8})
    choice = answer["choices"][0]
    return choice["text"] == record["answer"] and choice["finish_reason"] == "stop"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=str(ROOT / "build/cpu-release/spin"))
    parser.add_argument("--model", default=str(ROOT / "models/needle-29m"))
    parser.add_argument("--lengths", default="1k,4k,8k")
    parser.add_argument("--per-task", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--json", help="write the counts to this file")
    arguments = parser.parse_args()
    reference = json.loads((ROOT / "tests/data/ruler/reference_accuracy.json").read_text())
    passed = failed = 0
    report = {}
    serve = ["--model", arguments.model, "--dtype", arguments.dtype,
             "--max-num-batched-tokens", "1024"]
    with SpinServer(serve, arguments.binary) as server:
        for length in arguments.lengths.split(","):
            begin = time.monotonic()
            for task, records in load(length, arguments.per_task).items():
                with ThreadPoolExecutor(arguments.concurrency) as pool:
                    right = sum(pool.map(lambda r: answers_exactly(server, r), records))
                known, of = reference[length]["per_task"][task]
                line = max(0, len(records) - (of - known) - 1)
                ok = right >= line
                passed, failed = passed + ok, failed + (not ok)
                report.setdefault(length, {})[task] = [right, len(records)]
                print(f"{length:>4} {task:<12} {right}/{len(records)}  reference {known}/{of}"
                      f"  {'ok' if ok else 'BELOW'}", flush=True)
            counts = report[length].values()
            print(f"{length:>4} all          {sum(c[0] for c in counts)}/{sum(c[1] for c in counts)}"
                  f"  reference {reference[length]['exact']}"
                  f"  {time.monotonic() - begin:.0f} s", flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
