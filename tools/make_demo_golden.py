#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write tests/data/smollm2/demo_golden.json: SmolLM2's answer to the question of demo/.

The reference is transformers in fp32 on the dequantised Q4_1 weights, greedy until end of text.
`clear_tokens` counts the tokens from the start that win by more than --margin: those an engine must
reproduce even when it computes in bf16, and they must name the right person.
"""

import argparse
import pathlib

import gguf

import golden_support as support

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n")
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path,
                        default=ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "demo/esther.txt")
    parser.add_argument("--question", type=pathlib.Path, default=ROOT / "demo/question.txt")
    parser.add_argument("--fact", default="Haman")
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "tests/data/smollm2/demo_golden.json")
    args = parser.parse_args()

    reader = gguf.GGUFReader(str(args.model))
    tokenizer = support.smollm_tokenizer(reader)
    content = args.text.read_text(encoding="utf-8") + args.question.read_text(encoding="utf-8")
    ids = tokenizer.encode(HEAD + content + TAIL).ids
    model = support.model_from_state(support.llama_config(reader), support.gguf_state_dict(reader))
    model.set_attn_implementation("sdpa")
    greedy, margins, first = support.greedy(model, ids, 64, stop_id=2, chunk=1024)
    clear = next((i for i, m in enumerate(margins) if m <= args.margin), len(margins))
    text = tokenizer.decode(greedy)
    print(f"{len(ids)} prompt tokens, {len(greedy)} answer tokens, {clear} clear: {text!r}")
    if args.fact not in tokenizer.decode(greedy[:clear]):
        raise SystemExit(f"the clear part of the answer does not say {args.fact}")
    support.write_json(args.out, {
        "note": "user message: text file and question file one after the other, chat format, greedy",
        "gguf_sha256": support.sha256(args.model),
        "versions": support.versions(),
        "fact": args.fact,
        "answer": text,
        "clear_tokens": clear,
        "greedy_ids": greedy,
        "margins": [round(m, 4) for m in margins],
        "first_pos_top5": support.top_logits(first),
        "prompt_ids": ids})


if __name__ == "__main__":
    main()
