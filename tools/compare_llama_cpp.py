#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spin beside llama.cpp on the same GGUF file, the same threads and the same machine, in one run.

Each round measures both engines one after the other: prefill of 512 tokens, prefill of 8,000 tokens
and decode of 128 tokens after a prompt of 512. Prints each round, then the medians and the ratios
Spin / llama.cpp (above 1: Spin is faster) with their spread.

Run it with the Python of a virtual environment that has llama-cpp-python; its build flags are printed
by llama.cpp itself (system info). Usage:
  PYTHON tools/compare_llama_cpp.py --model M.gguf [--rounds 3] [--threads 2] [--json FILE]
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import llama_cpp

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "demo/esther.txt").read_text(encoding="utf-8")


def prompt_of(model, tokens):
    """The longest prefix of the demo text (repeated) of at most `tokens` tokens."""
    ids = model.tokenize((TEXT * 2).encode(), add_bos=False, special=False)[:tokens]
    return model.detokenize(ids).decode("utf-8", errors="ignore"), ids


def measure_llama(model, ids, decode_tokens):
    """(prefill tokens/s, decode tokens/s or None) of llama.cpp."""
    model.reset()
    begin = time.perf_counter()
    model.eval(ids)
    prefill = len(ids) / (time.perf_counter() - begin)
    if not decode_tokens:
        return prefill, None
    token = int(model.sample(temp=0.0))
    begin = time.perf_counter()
    for _ in range(decode_tokens):
        model.eval([token])
        token = int(model.sample(temp=0.0))
    return prefill, decode_tokens / (time.perf_counter() - begin)


def measure_spin(binary, model, text, decode_tokens, threads):
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as prompt:
        prompt.write(text)
        prompt.flush()
        command = [binary, "generate", "--model", model, "--prompt-file", prompt.name,
                   "--max-tokens", str(max(decode_tokens, 1) + (1 if decode_tokens else 0)),
                   "--temperature", "0", "--ignore-eos", "--threads", str(threads),
                   "--stats", "json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    stats = json.loads(done.stderr.strip().splitlines()[-1])
    return stats["prefill_tokens_per_s"], stats["decode_tokens_per_s"], stats


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=str(ROOT / "build/cpu-release/spin"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default="prefill_512,prefill_8000,decode_128")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    peer = llama_cpp.Llama(arguments.model, n_ctx=8192, n_batch=512, n_threads=arguments.threads,
                           n_threads_batch=arguments.threads, verbose=False)
    print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
    cases = {"prefill_512": (512, 0), "prefill_8000": (8000, 0), "decode_128": (512, 128)}
    samples = {}
    peak = {}
    for round_number in range(arguments.rounds):
        for name in arguments.cases.split(","):
            tokens, decode_tokens = cases[name]
            text, ids = prompt_of(peer, tokens)
            theirs = measure_llama(peer, ids, decode_tokens)[1 if decode_tokens else 0]
            prefill, decode, stats = measure_spin(arguments.binary, arguments.model, text,
                                                  decode_tokens, arguments.threads)
            ours = decode if decode_tokens else prefill
            samples.setdefault(name, []).append((ours, theirs))
            peak[name] = {key: stats[key] for key in (
                "prompt_tokens", "dtype", "peak_anonymous_bytes", "weight_bytes",
                "kv_used_bytes", "kv_reserved_bytes")}
            print(f"round {round_number + 1} {name}: spin {ours:.1f}, llama.cpp {theirs:.1f} tokens/s,"
                  f" ratio {ours / theirs:.2f}", flush=True)
    report = {}
    for name, pairs in samples.items():
        ratios = [ours / theirs for ours, theirs in pairs]
        report[name] = {"spin": [p[0] for p in pairs], "llama.cpp": [p[1] for p in pairs],
                        "ratio_median": statistics.median(ratios), "ratio_min": min(ratios),
                        "ratio_max": max(ratios), **peak[name]}
        print(f"{name}: ratio {report[name]['ratio_median']:.2f}"
              f" ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
