#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the tiny random checkpoints of tests/data/tiny with their fp32 golden logits.

Each folder tests/data/tiny/NAME holds a Hugging Face checkpoint (config.json, safetensors,
tokenizer.json), its GGUF twin NAME.gguf and golden.json. Every weight is a bf16 number that fp16
holds exactly too, so all files of one folder hold the same weights whatever their element type.
The seed of a checkpoint is the first whose greedy tokens are decided by clear margins.
"""

import argparse
import json
import math
import pathlib

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

import golden_support as support

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCAB = 320
SHORT, LONG, GREEDY = 40, 100, 24
# A greedy token must win by this part of the logit range: five times the tolerance of the tests.
MARGIN = 5e-3

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# `file` is the element type of the safetensors files, `gguf` that of the twin's matrices;
# `new_style` writes rope_parameters (transformers 5) in place of rope_theta and rope_scaling.
SPECS = {
    "llama-default": dict(arch="llama", heads=2, kv=2, dim=64, theta=10000.0, eps=1e-5,
                          file="F32", gguf="F32"),
    "llama-llama3rope": dict(arch="llama", heads=3, kv=1, dim=64, hidden=48, theta=500000.0,
                             eps=1e-5, rope=LLAMA3, file="F16", gguf="F16"),
    "llama-yarn": dict(arch="llama", heads=4, kv=1, dim=96, theta=10000.0, eps=1e-5, rope=YARN,
                       file="BF16", gguf="F16"),
    "llama-linear": dict(arch="llama", heads=4, kv=2, dim=64, layers=3, theta=10000.0, eps=1e-6,
                         rope={"type": "linear", "factor": 4.0}, tied=False, shards=2,
                         file="F16", gguf="F16"),
    "qwen2-bias": dict(arch="qwen2", heads=7, kv=1, dim=64, theta=1000000.0, eps=1e-6,
                       file="F16", gguf="BF16"),
    "qwen2-yarn": dict(arch="qwen2", heads=5, kv=1, dim=96, theta=1000000.0, eps=1e-6,
                       rope=dict(YARN, beta_fast=8.0, beta_slow=0.5), new_style=True,
                       file="BF16", gguf="F16"),
    "qwen3-default": dict(arch="qwen3", heads=8, kv=1, dim=64, theta=1000000.0, eps=1e-6,
                          file="F16", gguf="F16"),
    "qwen3-yarn": dict(arch="qwen3", heads=2, kv=2, dim=128, theta=10000.0, eps=1e-6, rope=YARN,
                       file="BF16", gguf="BF16"),
}

TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PAIRS = ("Ġt Ġa Ġs Ġo Ġw Ġb Ġc Ġf Ġi Ġm Ġp Ġd Ġh Ġl he in er on re an at en nd or es is it ed ar ou "
         "al st ng le ve me of th as to se ll ha ow be wh ne no om ea ch ot us ro ma el il ir ut id "
         "ur").split()
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_letters():
    """GPT-2's printable letter of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, other = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte if byte in printable else 256 + other)
        other += byte not in printable
    return letters


def tokenizer_parts():
    """(tokens, merges): 256 bytes, one token per pair, the specials at the end."""
    tokens = [byte_letters()[b] for b in range(256)] + PAIRS
    specials = SPECIALS
    fill = VOCAB - len(tokens) - len(specials)
    if fill != 0:
        raise ValueError(f"vocabulary is off by {fill}")
    return tokens, [f"{p[0]} {p[1]}" for p in PAIRS]


def write_tokenizer(folder):
    tokens, merges = tokenizer_parts()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": False}
    added = [{"id": len(tokens) + i, "content": s, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True}
             for i, s in enumerate(SPECIALS)]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated",
             "invert": False}, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges},
    }
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None,
              "eos_token": SPECIALS[2], "pad_token": SPECIALS[0], "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def config_of(spec):
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
               "qwen3": "Qwen3ForCausalLM"}
    hidden = spec.get("hidden", 32)
    config = {
        "architectures": [classes[spec["arch"]]],
        "model_type": spec["arch"],
        "attention_bias": False,
        "bos_token_id": VOCAB - 3,
        "eos_token_id": VOCAB - 1,
        "head_dim": spec["dim"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "num_attention_heads": spec["heads"],
        "num_hidden_layers": spec.get("layers", 2),
        "num_key_value_heads": spec["kv"],
        "rms_norm_eps": spec["eps"],
        "tie_word_embeddings": spec.get("tied", True),
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[spec["file"]],
        "vocab_size": VOCAB,
    }
    if spec["arch"] == "qwen2":
        del config["attention_bias"]  # Qwen2 always has a bias on q, k and v
    if spec.get("new_style"):
        config["rope_parameters"] = dict(spec["rope"], rope_theta=spec["theta"])
    else:
        config["rope_theta"] = spec["theta"]
        config["rope_scaling"] = spec.get("rope")
    return config


def random_state(model, seed):
    """Weights of all parameters: bf16 numbers, exact in fp16, with attention that is not flat."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 2.0 + 0.5 * noise.clamp(-2, 2)
        elif name.endswith("norm.weight"):
            value = 1.0 + 0.3 * noise.clamp(-2, 2)
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = noise
        else:
            value = noise * (1.5 / math.sqrt(param.shape[1]))
        value = value.to(torch.bfloat16).float()
        value[value.abs() < 2.0 ** -15] = 0.0  # below this fp16 would lose bits of a bf16 number
        if not torch.equal(value.half().float(), value):
            raise ValueError(f"{name} is not exact in fp16")
        state[name] = value
    return state


@torch.no_grad()
def case_of(model, name, ids, kept):
    """One golden case, or None when a greedy token is not decided clearly."""
    logits = model(torch.tensor([ids])).logits[0]
    spread = float(logits[-1].max() - logits[-1].min())
    tokens, margins, first = support.greedy(model, ids, GREEDY)
    if min(margins) < MARGIN * spread or len(set(tokens)) < GREEDY // 3 or VOCAB - 1 in tokens:
        return None
    if (first - logits[-1]).abs().max() > 1e-5 * spread:
        raise ValueError("cached and uncached logits differ")
    top = torch.topk(logits, 2, dim=-1)
    gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
    positions = list(range(len(ids) - kept, len(ids)))
    return {
        "name": name,
        "prompt_ids": ids,
        "logit_range": round(spread, 5),
        "argmax": top.indices[:, 0].tolist(),
        "argmax_margins": [round(g, 4) for g in gaps],
        "positions": positions,
        "logits": [[round(float(x), 5) for x in logits[p]] for p in positions],
        "greedy_ids": tokens,
        "min_greedy_margin": round(min(margins), 5),
    }


def build(config_dict, spec_index):
    """(state, cases, seed) of the first seed that passes."""
    config = AutoConfig.for_model(**config_dict)
    for attempt in range(1000):
        seed = 1000 * (spec_index + 1) + attempt
        generator = np.random.default_rng(seed)
        prompts = [generator.integers(0, VOCAB - 3, n).tolist() for n in (SHORT, LONG)]
        config._attn_implementation = "eager"
        model = support.model_from_state(config, random_state(blank(config), seed))
        cases = []
        for name, ids, kept in (("short", prompts[0], 4), ("long", prompts[1], 2)):
            case = case_of(model, name, ids, kept)
            if case is None:
                break
            cases.append(case)
        if len(cases) == 2:
            state = {n: p.detach().clone() for n, p in model.named_parameters()}
            return state, cases, seed
    raise SystemExit("no seed gives clear margins")


def blank(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def check_rope_matters(config_dict, state, cases):
    """A wrong RoPE variant must move the long case's logits far beyond the tolerance."""
    plain = {k: v for k, v in config_dict.items() if k not in ("rope_scaling", "rope_parameters")}
    theta = config_dict.get("rope_theta") or config_dict["rope_parameters"]["rope_theta"]
    model = support.model_from_state(AutoConfig.for_model(**dict(plain, rope_theta=theta)), state)
    logits = model(torch.tensor([cases[1]["prompt_ids"]])).logits[0, -1]
    moved = (logits - torch.tensor(cases[1]["logits"][-1])).abs().max() / cases[1]["logit_range"]
    if moved < 0.01:
        raise SystemExit(f"RoPE scaling moves the logits by {moved} of their range only")
    return float(moved)


def write_safetensors(folder, spec, state):
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    tensors = {n: t.to(TORCH_TYPES[spec["file"]]).contiguous() for n, t in state.items()}
    shards = spec.get("shards", 1)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        part = names[i * len(names) // shards:(i + 1) * len(names) // shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update({n: file for n in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def llama3_divisors(theta, dim, rope):
    """rope_freqs.weight: what each frequency is divided by."""
    frequency = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def add_rope_keys(writer, spec):
    writer.add_rope_freq_base(spec["theta"])
    if spec["arch"] == "llama":
        writer.add_rope_dimension_count(spec["dim"])
    rope = spec.get("rope") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    elif kind == "llama3":
        divisors = llama3_divisors(spec["theta"], spec["dim"], rope)
        writer.add_tensor("rope_freqs.weight", divisors)


def add_gguf_tokenizer(writer):
    tokens, merges = tokenizer_parts()
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + SPECIALS)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(VOCAB - 3)
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_pad_token_id(VOCAB - 3)
    writer.add_add_bos_token(False)


def write_gguf(path, name, spec, config, state):
    writer = gguf.GGUFWriter(str(path), spec["arch"])
    writer.add_name(name)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(spec["heads"])
    writer.add_head_count_kv(spec["kv"])
    writer.add_key_length(spec["dim"])
    writer.add_value_length(spec["dim"])
    writer.add_layer_norm_rms_eps(spec["eps"])
    add_rope_keys(writer, spec)
    add_gguf_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[spec["gguf"]]
    for tensor_name, tensor in state.items():
        data = tensor.numpy()
        if spec["arch"] == "llama" and ".q_proj." in tensor_name:
            data = support.permute(data, spec["heads"])
        if spec["arch"] == "llama" and ".k_proj." in tensor_name:
            data = support.permute(data, spec["kv"])
        target = support.gguf_name(tensor_name)
        if data.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(data), kind),
                              raw_dtype=kind)
        else:
            writer.add_tensor(target, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def check_gguf(path, config_dict, cases):
    """The GGUF twin, read back, gives the same logits (RoPE of the config)."""
    state = support.gguf_state_dict(gguf.GGUFReader(str(path)))
    model = support.model_from_state(AutoConfig.for_model(**config_dict), state)
    logits = model(torch.tensor([cases[0]["prompt_ids"]])).logits[0, -1]
    if (logits - torch.tensor(cases[0]["logits"][-1])).abs().max() > 1e-4:
        raise SystemExit(f"{path} does not hold the weights of its checkpoint")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/data/tiny")
    parser.add_argument("names", nargs="*", help="checkpoints to write (default: all)")
    args = parser.parse_args()
    for index, (name, spec) in enumerate(SPECS.items()):
        if args.names and name not in args.names:
            continue
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        config = config_of(spec)
        state, cases, seed = build(config, index)
        moved = check_rope_matters(config, state, cases) if spec.get("rope") else None
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_tokenizer(folder)
        write_safetensors(folder, spec, state)
        write_gguf(folder / f"{name}.gguf", name, spec, config, state)
        check_gguf(folder / f"{name}.gguf", config, cases)
        support.write_json(folder / "golden.json", {
            "name": name, "seed": seed, "versions": support.versions(), "cases": cases})
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{name:18} seed {seed} group {spec['heads'] // spec['kv']} dim {spec['dim']}"
              f" margins {[c['min_greedy_margin'] for c in cases]}"
              f" ranges {[c['logit_range'] for c in cases]} rope moves {moved}"
              f" {size // 1000} kB", flush=True)


if __name__ == "__main__":
    main()
