#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct through the HTTP server against the fp32 reference of tests/data/smollm2.

Checks, in fp32: the prompt ids and the 32 greedy tokens of five prompts; in the machine's own dtype:
the demo's question about its long text. Needs build/cpu-release/spin and the model
(tools/fetch_smollm2.sh). Ends with "N passed, M failed"; exit status 0 when none failed.
"""
import argparse
import json
import pathlib
import sys

from spin_server import SpinServer

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data/smollm2"


def check_greedy(server, prompt):
    """None when the server repeats the reference, else what differs."""
    ids = server.post("/tokenize", {"prompt": prompt["text"]})["tokens"]
    if ids != prompt["prompt_ids"]:
        return "prompt ids differ"
    answer = server.post("/v1/completions", {
        "prompt": prompt["text"], "temperature": 0, "max_tokens": len(prompt["greedy_ids"]),
        "ignore_eos": True})
    text = answer["choices"][0]["text"]
    return None if text == prompt["greedy_text"] else f"expected {prompt['greedy_text']!r}, got {text!r}"


def check_demo(server, golden):
    """The long text and its question: the prompt's ids, and the first clear tokens of the answer."""
    text = (ROOT / "demo/esther.txt").read_text(encoding="utf-8")
    question = (ROOT / "demo/question.txt").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": text + question}]
    ids = server.post("/tokenize", {"messages": messages})["tokens"]
    if ids != golden["prompt_ids"]:
        return f"prompt ids differ ({len(ids)}, expected {len(golden['prompt_ids'])})"
    answer = server.post("/v1/chat/completions",
                         {"messages": messages, "temperature": 0, "max_tokens": 48})
    content = answer["choices"][0]["message"]["content"]
    return None if golden["fact"] in content else f"expected {golden['fact']!r} in {content!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=str(ROOT / "build/cpu-release/spin"))
    parser.add_argument("--model",
                        default=str(ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    arguments = parser.parse_args()
    golden = json.loads((DATA / "golden.json").read_text())
    passed = failed = 0

    def report(name, problem):
        nonlocal passed, failed
        passed, failed = passed + (problem is None), failed + (problem is not None)
        print(f"{name}: {problem or 'ok'}", flush=True)

    common = ["--model", arguments.model, "--max-num-seqs", "1"]
    with SpinServer([*common, "--dtype", "float32"], arguments.binary) as server:
        for prompt in golden["prompts"]:
            report(f"greedy {prompt['kind']}", check_greedy(server, prompt))
    with SpinServer(common, arguments.binary) as server:
        report("demo", check_demo(server, json.loads((DATA / "demo_golden.json").read_text())))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
