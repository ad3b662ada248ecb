#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of 8 concurrent requests beside one, through the HTTP server, in one run.

Each round measures one request alone and then 8 together (short prompts, --tokens output tokens,
ignore_eos), so that both share the machine's state. Prints each round's ratio and the median.

Usage: tools/bench_concurrency.py --model M.gguf [--rounds 3] [--tokens 128] [--threads 2]
"""
import argparse
import pathlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from spin_server import SpinServer

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(server, count, tokens):
    """Generated tokens per second of `count` requests that start together."""
    def one(index):
        answer = server.post("/v1/completions", {
            "prompt": f"Chapter {index}. Once upon a time", "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True})
        return answer["usage"]["completion_tokens"]
    begin = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        total = sum(pool.map(one, range(count)))
    return total / (time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=str(ROOT / "build/cpu-release/spin"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--threads", default="2")
    arguments = parser.parse_args()
    serve = ["--model", arguments.model, "--threads", arguments.threads]
    ratios = []
    with SpinServer(serve, arguments.binary) as server:
        run(server, 1, 16)  # warm-up
        for _ in range(arguments.rounds):
            alone = run(server, 1, arguments.tokens)
            together = run(server, arguments.concurrency, arguments.tokens)
            ratios.append(together / alone)
            print(f"one {alone:.1f} tokens/s, {arguments.concurrency} together {together:.1f} tokens/s,"
                  f" ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
