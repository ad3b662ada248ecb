#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write models/needle-29m/needle-29m-q8_0.gguf from the bf16 checkpoint, and its golden answers.

The checkpoint is a folder with model.safetensors (bf16), config.json and tokenizer.json. Matrices
become Q8_0, norms stay F32. The prompts of --vectors are then answered by transformers in fp32
with the dequantised weights; the script fails if an answer marked exact is no longer exact, and
else writes the answers with the top-5 logits of the first answer position to --golden.

  tools/make_needle_gguf.py --checkpoint DIR --vectors tests/data/needle/vectors.json
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import golden_support as support

ROOT = pathlib.Path(__file__).resolve().parent.parent


def add_tokenizer(writer, tokenizer, config):
    """tokenizer.ggml.* from tokenizer.json; ids without a token are marked UNUSED."""
    size = config["vocab_size"]
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ids = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)


def write_gguf(checkpoint, out):
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(out), "qwen3")
    writer.add_name("needle-29m")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer, tokenizer, config)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        data = tensor.float().numpy()
        if data.ndim == 2:
            writer.add_tensor(support.gguf_name(name), gguf.quants.quantize(data, q8), raw_dtype=q8)
        else:
            writer.add_tensor(support.gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer_all(model, items):
    """Greedy answers of every prompt, with the margins by which each token won."""
    answers = []
    for item in items:
        ids, margins, first = support.greedy(model, item["prompt_ids"], len(item["answer_ids"]))
        exact = ids == item["answer_ids"]
        print(f"{item['task']:12} {len(item['prompt_ids']):5} tokens  exact {exact}"
              f"  min margin {min(margins):.4f}", flush=True)
        if item["exact"] and not exact:
            raise SystemExit("Q8_0 changes an answer; use bf16 weights instead")
        answers.append({
            "task": item["task"],
            "prompt_ids": item["prompt_ids"],
            "answer_ids": ids,
            "exact": exact,
            "first_pos_top5": support.top_logits(first),
            "min_margin": round(min(margins), 4),
        })
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--vectors", type=pathlib.Path,
                        default=ROOT / "tests/data/needle/vectors.json")
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "models/needle-29m/needle-29m-q8_0.gguf")
    parser.add_argument("--golden", type=pathlib.Path,
                        default=ROOT / "tests/data/needle/vectors_q8_0.json")
    args = parser.parse_args()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(args.checkpoint, args.out)
    reader = gguf.GGUFReader(str(args.out))
    model = support.model_from_state(AutoConfig.from_pretrained(args.checkpoint),
                                     support.gguf_state_dict(reader))
    items = json.loads(args.vectors.read_text(encoding="utf-8"))["items"]
    support.write_json(args.golden, {
        "note": "fp32 arithmetic on the dequantised Q8_0 weights of the GGUF file named here; "
                "greedy decoding must give answer_ids",
        "gguf_sha256": support.sha256(args.out),
        "versions": support.versions(),
        "items": answer_all(model, items),
    })
    print(f"wrote {args.out} ({args.out.stat().st_size} bytes) and {args.golden}")


if __name__ == "__main__":
    main()
