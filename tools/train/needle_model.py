# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 decoder for training needle-29m: GQA, RMS norm on q and k, RoPE, SwiGLU, tied embeddings.

Parameters bear the names of Hugging Face's Qwen3ForCausalLM, so a saved checkpoint loads in every
engine that knows Qwen3.
"""

import dataclasses
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    vocab: int = 8256  # 8,192 BPE ids and 3 specials, padded to a multiple of 64
    hidden: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    feed_forward: int = 1536
    theta: float = 1e6
    eps: float = 1e-6
    max_positions: int = 131072

    @property
    def group(self):
        return self.heads // self.kv_heads

    def config(self):
        """config.json of the checkpoint."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "bos_token_id": 8192, "eos_token_id": 8194, "head_dim": self.head_dim,
            "hidden_act": "silu", "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": self.max_positions, "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps, "rope_scaling": None, "rope_theta": self.theta,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": self.vocab,
        }


class RmsNorm(nn.Module):
    def __init__(self, size, eps, gain=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(gain)))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


def rotary_tables(positions, dim, theta, dtype):
    """cos and sin [len(positions), dim], both halves of a head alike."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angle = torch.outer(positions.float(), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """RoPE of x [..., positions, dim], first half against second half."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    # With normed q and k a logit is at most sqrt(head_dim) * gain_q * gain_k. One key can stand out
    # among 131,072 only if that exceeds ln 131072 = 11.8 by a margin, which gains of 1 do not reach.
    QK_GAIN = 1.5

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.eps, self.QK_GAIN)
        self.k_norm = RmsNorm(shape.head_dim, shape.eps, self.QK_GAIN)

    def project(self, x):
        """q [batch, heads, t, dim], k and v [batch, kv_heads, t, dim]; q and k before RoPE."""
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return q, k, self.v_proj(x).view(heads).transpose(1, 2)

    def forward(self, x, cos, sin):
        q, k, v = self.project(x)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v,
                                             is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class NeedleModel(nn.Module):
    def __init__(self, shape=Shape()):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.eps)
        residual = 0.02 / math.sqrt(2 * shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual if into_residual else 0.02)

    def hidden(self, ids, dtype, run_layer=None):
        """Final hidden states [batch, t, hidden]; run_layer wraps a layer (to compile it)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rotary_tables(positions, self.shape.head_dim, self.shape.theta, dtype)
        x = self.embed_tokens(ids).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin) if run_layer is None else run_layer(layer, x, cos, sin)
        return self.norm(x)

    def logits(self, hidden):
        return (hidden @ self.embed_tokens.weight.to(hidden.dtype).t()).float()


def save_checkpoint(model, folder):
    """config.json and model.safetensors (bf16) in Hugging Face's form."""
    from safetensors.torch import save_file

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16).cpu().contiguous()
               for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.shape.config(), indent=1) + "\n")


def load_weights(model, path):
    """Weights from a folder or file: model.safetensors, or a GGUF of architecture qwen3."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if path.suffix == ".gguf":
        import sys

        import gguf

        sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
        from golden_support import gguf_state_dict

        state = gguf_state_dict(gguf.GGUFReader(str(path)))
    else:
        from safetensors.torch import load_file

        state = load_file(path)
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
