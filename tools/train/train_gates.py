#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distil decode gates for needle-29m in the way of SeerAttention-R (arXiv 2506.08889).

  tools/train/train_gates.py --model models/needle-29m/needle-29m-q8_0.gguf --block 64

A gate scores blocks of keys for a query from projections of both. Its target is the attention of
the frozen model: the largest softmax weight inside each block, the largest over the query heads of
a KV head, normalised; the loss is the KL divergence. Full attention rows are formed only for some
sampled query positions, so no special kernel is needed. At the end the gates are judged by exact
answers when answer positions see only the selected blocks in every layer.
"""

import argparse
import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from needle_model import NeedleModel, RmsNorm, load_weights, rotary_tables, rotate
from prompts import ROOT, TASKS, PromptFactory

GATE_DIM, WARM_UP = 128, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Gate(nn.Module):
    """Block scores of one layer from q and k before RoPE."""

    def __init__(self, shape, block):
        super().__init__()
        self.shape, self.block = shape, block
        self.query = nn.Parameter(
            torch.randn(shape.kv_heads, shape.group, shape.head_dim, GATE_DIM) * 0.02)
        self.key = nn.Parameter(torch.randn(shape.kv_heads, 3 * shape.head_dim, GATE_DIM) * 0.02)
        self.query_norm = RmsNorm(GATE_DIM, shape.eps)
        self.key_norm = RmsNorm(GATE_DIM, shape.eps)

    def _rotated(self, x, positions):
        return rotate(x, *rotary_tables(positions, GATE_DIM, self.shape.theta, torch.float32))

    def compressed_keys(self, k):
        """k [kv_heads, t, head_dim] -> [kv_heads, blocks, gate_dim]; RoPE at a block's first token."""
        parts = [torch.cat((b.amax(1), b.amin(1), b.mean(1)), dim=-1)
                 for b in k.float().split(self.block, dim=1)]
        keys = self.key_norm(torch.einsum("hni,hio->hno", torch.stack(parts, dim=1), self.key))
        return self._rotated(keys, torch.arange(len(parts), device=k.device) * self.block)

    def forward(self, q, k, positions):
        """q [heads, rows, head_dim] at `positions` [rows] -> scores [kv_heads, rows, blocks]."""
        grouped = q.float().unflatten(0, (self.shape.kv_heads, self.shape.group))
        queries = self.query_norm(torch.einsum("hgsi,hgio->hso", grouped, self.query))
        keys = self.compressed_keys(k)
        scores = self._rotated(queries, positions) @ keys.transpose(1, 2) / math.sqrt(GATE_DIM)
        first = torch.arange(keys.shape[1], device=k.device) * self.block
        return scores.masked_fill(first > positions[:, None], -1e20)


def attention_rows(q, k, positions):
    """Causal softmax rows [heads, rows, t] of q [heads, rows, d] against k [kv_heads, t, d]."""
    group = q.shape[0] // k.shape[0]
    logits = q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(q.shape[-1])
    later = torch.arange(k.shape[1], device=k.device) > positions[:, None]
    return logits.masked_fill(later, float("-inf")).softmax(-1)


def block_weights(rows, block, kv_heads):
    """Largest weight in each block, largest over the heads of a KV head: [kv_heads, rows, blocks]."""
    padded = F.pad(rows, (0, -rows.shape[-1] % block))
    return padded.unflatten(-1, (-1, block)).amax(-1).unflatten(0, (kv_heads, -1)).amax(1)


class Distiller:
    def __init__(self, args):
        self.args = args
        self.model = NeedleModel().to(DEVICE)
        load_weights(self.model, args.model)
        self.model.requires_grad_(False)
        self.shape = self.model.shape
        self.gates = nn.ModuleList(Gate(self.shape, args.block) for _ in self.model.layers)
        self.gates.to(DEVICE)

    @torch.no_grad()
    def layers(self, ids):
        """Runs the frozen model; yields (index, layer, q, k, v, rotated k, cos, sin) of each layer."""
        positions = torch.arange(ids.shape[1], device=DEVICE)
        cos, sin = rotary_tables(positions, self.shape.head_dim, self.shape.theta, DTYPE)
        x = self.model.embed_tokens(ids).to(DTYPE)
        for index, layer in enumerate(self.model.layers):
            with torch.autocast(DEVICE, dtype=DTYPE, enabled=DEVICE == "cuda"):
                q, k, v = layer.self_attn.project(layer.input_layernorm(x))
                yield index, layer, q[0], k[0], v[0], rotate(k, cos, sin)[0], cos, sin
                x = layer(x, cos, sin)

    def loss(self, ids, positions):
        """Mean KL divergence over layers, KV heads and rows."""
        total = 0.0
        for index, _, q, k, _, rotated, cos, sin in self.layers(ids):
            with torch.no_grad():
                rows = attention_rows(rotate(q[:, positions], cos[positions], sin[positions]),
                                      rotated, positions)
                target = block_weights(rows, self.args.block, self.shape.kv_heads)
                target = target / target.sum(-1, keepdim=True)
            with torch.enable_grad(), torch.autocast(DEVICE, enabled=False):
                scores = self.gates[index](q[:, positions], k, positions).log_softmax(-1)
                total = total + F.kl_div(scores, target, reduction="sum") / target[..., 0].numel()
        return total / len(self.gates)

    def chosen(self, source, index, q, k, rows, positions, budget):
        """Mask [kv_heads, rows, blocks] of `budget` tokens by gate or oracle, current block included."""
        if source == "gate":
            scores = self.gates[index](q, k, positions)
        else:
            scores = block_weights(rows, self.args.block, self.shape.kv_heads)
        count = min(budget // self.args.block, scores.shape[-1])
        keep = torch.zeros_like(scores, dtype=torch.bool)
        keep.scatter_(-1, scores.topk(count, dim=-1).indices, True)
        current = (positions // self.args.block)[None, :, None].expand(scores.shape[0], -1, 1)
        return keep.scatter_(-1, current, True)

    @torch.no_grad()
    def answers(self, ids, positions, source, budget):
        """Arg max at `positions` when these rows see only the chosen blocks (source "dense": all)."""
        x = self.model.embed_tokens(ids).to(DTYPE)[:, positions]
        for index, layer, _, k, v, rotated, cos, sin in self.layers(ids):
            q = layer.self_attn.project(layer.input_layernorm(x))[0][0]
            rows = attention_rows(rotate(q, cos[positions], sin[positions]), rotated, positions)
            if source != "dense":
                keep = self.chosen(source, index, q, k, rows, positions, budget)
                tokens = keep.repeat_interleave(self.args.block, -1)[..., :rows.shape[-1]]
                rows = rows * tokens.repeat_interleave(self.shape.group, 0)
                rows = rows / rows.sum(-1, keepdim=True)
            mixed = rows @ v.float().repeat_interleave(self.shape.group, 0)
            x = x + layer.self_attn.o_proj(mixed.transpose(0, 1).reshape(1, len(positions), -1).to(DTYPE))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.logits(self.model.norm(x))[0].argmax(-1)

    def save(self, folder):
        from safetensors.torch import save_file

        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = {"query": "linear_q", "key": "linear_k", "query_norm": "qnorm", "key_norm": "knorm"}
        tensors = {}
        for index, gate in enumerate(self.gates):
            for name, parameter in gate.named_parameters():
                target = names[name.removesuffix(".weight")]
                tensors[f"model.layers.{index}.self_attn.attn_gate.attngate_{target}.weight"] = (
                    parameter.detach().to(torch.bfloat16).cpu().contiguous())
        save_file(tensors, folder / "attn_gate_weights.safetensors", metadata={"format": "pt"})
        config = {
            "base_model": "needle-29m", "seerattn_gate_block_size": self.args.block,
            "seerattn_gate_hidden_size": GATE_DIM, "seerattn_k_seq_pooling_type": "Kmaxminavg",
            "seerattn_q_head_pooling_type": "Qproj", "seerattn_use_qk_norm": True,
            "seerattn_use_rope": True, "seerattn_rope_position": "block_first",
            "seerattn_start_layer": 0}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def sampled_rows(rng, answers, length, count):
    """Half answer positions, half from the second half of the text."""
    some = rng.choice(answers, min(len(answers), count // 2), replace=False)
    return np.unique(np.concatenate([some, rng.integers(length // 2, length, count // 2)]))


def train(distiller, args):
    factory, rng = PromptFactory(args.data, args.tokenizer), np.random.default_rng(args.seed)
    optimizer = torch.optim.AdamW(distiller.gates.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(args.steps):
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARM_UP) * cosine
        ids, question = factory.batch(rng, 1, args.length, min(64, args.length // 128))
        rows = sampled_rows(rng, np.flatnonzero(question[0] >= 0), args.length, args.rows)
        loss = distiller.loss(torch.from_numpy(ids[:, :-1]).to(DEVICE),
                              torch.from_numpy(rows).to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} KL per layer {loss.item():.4f}", flush=True)


def judge(distiller, args):
    factory = PromptFactory(args.data, args.tokenizer, held_out=True)
    rng = np.random.default_rng(args.seed + 1)
    budgets = [int(b) for b in args.budgets.split(",")]
    ways = [("dense", 0)] + [(source, b) for b in budgets for source in ("gate", "oracle")]
    exact = dict.fromkeys(ways, 0)
    for number in range(args.eval):
        ids, question = factory.batch(rng, 1, args.length, 1, TASKS[number % len(TASKS)])
        positions = torch.from_numpy(np.flatnonzero(question[0] >= 0)).to(DEVICE)
        labels = torch.from_numpy(ids[0, 1:]).to(DEVICE)[positions]
        prompt = torch.from_numpy(ids[:, :-1]).to(DEVICE)
        for source, budget in ways:
            got = distiller.answers(prompt, positions, source, budget)
            exact[source, budget] += bool((got == labels).all())
    for (source, budget), count in exact.items():
        print(f"{source:6} budget {budget:5}: {count} of {args.eval} answers exact", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models/needle-29m/needle-29m-q8_0.gguf"))
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=384, help="query positions a sequence")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", default="512,1024,2048,4096", help="tokens, for the judgement")
    parser.add_argument("--eval", type=int, default=36, help="prompts, for the judgement")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "build/train-data")
    parser.add_argument("--tokenizer", default=str(ROOT / "models/needle-29m/tokenizer.json"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/gates")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    distiller = Distiller(args)
    train(distiller, args)
    judge(distiller, args)
    distiller.save(args.out)


if __name__ == "__main__":
    main()
