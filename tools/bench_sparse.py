#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode speed of sparse settings beside dense attention on one long prompt.

Each round runs dense attention and then every setting, each in a process of its own, so that a ratio's two
sides share the machine's state. Decode speed is that of the tokens after the first; prefill is dense in all of
them, but builds the setting's index. A setting `SPARSE@FLAGS` gets more flags of `spin generate`, for example
`sketch@--fast-memory 30000000 --kv-offloading-size 2000000000`.

Usage: tools/bench_sparse.py --model M --prompt-file F --sparse sketch --sparse retroinfer [--rounds 3]
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(arguments, setting):
    """The statistics of one run; an empty setting is dense attention."""
    sparse, _, flags = setting.partition("@")
    command = [arguments.binary, "generate", "--model", arguments.model, "--prompt-file", arguments.prompt_file,
               "--temperature", "0", "--max-tokens", str(arguments.tokens), "--ignore-eos",
               "--threads", str(arguments.threads), "--stats", "json", "--log-level", "error", *flags.split()]
    if arguments.tokenizer:
        command += ["--tokenizer", arguments.tokenizer]
    if sparse:
        command += ["--sparse", sparse]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{sparse or 'dense'}: {done.stderr.strip()}")
    return json.loads(done.stderr.strip().splitlines()[-1])


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=str(ROOT / "build/cpu-release/spin"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--prompt-file", required=True)
    parser.add_argument("--sparse", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    speeds = {setting: [] for setting in ["", *arguments.sparse]}
    ratios = {setting: [] for setting in arguments.sparse}
    for turn in range(arguments.rounds):
        for setting, seen in speeds.items():
            stats = run(arguments, setting)
            seen.append(stats["decode_tokens_per_s"])
            if setting:
                ratios[setting].append(seen[-1] / speeds[""][-1])
            print(f"round {turn + 1} {setting or 'dense'}: {stats['prompt_tokens']} tokens, first token after "
                  f"{stats['ttft_s']:.1f} s, then {seen[-1]:.1f} tokens/s", flush=True)
    print("\n| setting | decode, tokens/s | by dense, median (min to max) |\n|---|---|---|")
    print(f"| dense | {spread(speeds[''], 1)} | 1 |")
    for setting in arguments.sparse:
        print(f"| `{setting}` | {spread(speeds[setting], 1)} | {spread(ratios[setting], 2)} |")


if __name__ == "__main__":
    main()
