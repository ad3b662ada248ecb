#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count exact answers of a needle-29m GGUF on tests/data/ruler, per task and length.

The answer is fed with the prompt and every answer token must be the arg max of its position, which
is the same as greedy decoding giving the whole answer. fp32 arithmetic on the dequantised weights.

  tools/make_needle_accuracy.py --lengths 1k,4k,8k
"""

import argparse
import gzip
import json
import pathlib

import gguf
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

import golden_support as support

ROOT = pathlib.Path(__file__).resolve().parent.parent


@torch.no_grad()
def hits(model, prompt_ids, answer_ids):
    """True for each answer token that greedy decoding gets right after the ones before it."""
    ids = torch.tensor([prompt_ids + answer_ids[:-1]])
    logits = model(ids, logits_to_keep=len(answer_ids)).logits[0]
    return (logits.argmax(-1) == torch.tensor(answer_ids)).tolist()


def count(model, tokenizer, path):
    per_task, tokens, right = {}, 0, 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            got = hits(model, tokenizer.encode(item["prompt"]).ids, item["answer_ids"])
            cell = per_task.setdefault(item["task"], [0, 0])
            cell[0] += all(got)
            cell[1] += 1
            tokens, right = tokens + len(got), right + sum(got)
    return {
        "exact": sum(c[0] for c in per_task.values()),
        "of": sum(c[1] for c in per_task.values()),
        "token_accuracy": round(right / tokens, 4),
        "per_task": per_task,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = ROOT / "models/needle-29m"
    parser.add_argument("--model", type=pathlib.Path, default=folder / "needle-29m-q8_0.gguf")
    parser.add_argument("--config", type=pathlib.Path, default=folder)
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "tests/data/ruler")
    parser.add_argument("--lengths", default="1k,4k,8k")
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "tests/data/ruler/accuracy_q8_0.json")
    args = parser.parse_args()

    state = support.gguf_state_dict(gguf.GGUFReader(str(args.model)))
    model = support.model_from_state(AutoConfig.from_pretrained(args.config), state)
    model.set_attn_implementation("sdpa")
    tokenizer = Tokenizer.from_file(str(args.config / "tokenizer.json"))
    result = {
        "note": "as reference_accuracy.json, for the dequantised Q8_0 weights",
        "gguf_sha256": support.sha256(args.model),
        "versions": support.versions(),
    }
    for length in args.lengths.split(","):
        result[length] = count(model, tokenizer, args.data / f"ruler_{length}.jsonl.gz")
        print(length, json.dumps(result[length]), flush=True)
    support.write_json(args.out, result)


if __name__ == "__main__":
    main()
