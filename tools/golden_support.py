# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the scripts that write golden data and GGUF files.

Two directions between the tensor names of Hugging Face checkpoints and those of GGUF, the row
permutation that GGUF files of architecture `llama` carry in Q and K, and greedy decoding with
margins in fp32 (KV cache included), the reference for everything under tests/data.
"""

import hashlib
import json
import pathlib

import gguf
import numpy as np
import torch

_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(hf_name):
    """GGUF's name of a checkpoint tensor."""
    if hf_name in _TOP_NAMES:
        return _TOP_NAMES[hf_name]
    parts = hf_name.split(".")
    if parts[:2] != ["model", "layers"]:
        raise ValueError(f"no GGUF name for tensor {hf_name}")
    module, suffix = ".".join(parts[3:-1]), parts[-1]
    return f"blk.{parts[2]}.{_BLOCK_NAMES[module]}.{suffix}"


def hf_name(name):
    """Checkpoint name of a GGUF tensor."""
    for ours, theirs in _TOP_NAMES.items():
        if theirs == name:
            return ours
    parts = name.split(".")
    module = next(k for k, v in _BLOCK_NAMES.items() if v == parts[2])
    return f"model.layers.{parts[1]}.{module}.{parts[3]}"


def permute(weight, heads):
    """Rows of Q or K in GGUF's `llama` order: each head's two halves interleaved.

    weight [heads * d, ...] as [heads, 2, d/2, ...] -> [heads, d/2, 2, ...].
    """
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def unpermute(weight, heads):
    """Inverse of permute()."""
    shape = weight.shape
    return weight.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_state_dict(reader):
    """All tensors of a gguf.GGUFReader as fp32 torch tensors under checkpoint names."""
    arch = reader.get_field("general.architecture").contents()
    heads = reader.get_field(f"{arch}.attention.head_count").contents()
    kv_heads = reader.get_field(f"{arch}.attention.head_count_kv").contents()
    state = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if arch == "llama" and ".attn_q." in tensor.name:
            data = unpermute(data, heads)
        if arch == "llama" and ".attn_k." in tensor.name:
            data = unpermute(data, kv_heads)
        state[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(data))
    return state


def model_from_state(config, state):
    """An fp32 model of transformers with exactly these weights (a tied head may be absent)."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if not (config.tie_word_embeddings and m == "lm_head.weight")]
    if missing or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def greedy(model, prompt_ids, count, stop_id=None, chunk=512):
    """Greedy continuation: (ids, margins, logits of the last prompt position).

    A margin is the top-1 logit minus the top-2 logit of the step that chose the token. The prompt
    goes through in chunks so that attention never needs a full T x T matrix.
    """
    from transformers import DynamicCache

    cache, logits = DynamicCache(config=model.config), None
    for start in range(0, len(prompt_ids), chunk):
        part = torch.tensor([prompt_ids[start:start + chunk]])
        logits = model(part, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    first, ids, margins = logits.clone(), [], []
    while True:
        top = torch.topk(logits, 2)
        ids.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        if len(ids) == count or ids[-1] == stop_id:
            return ids, margins, first
        logits = model(torch.tensor([[ids[-1]]]), cache=cache, use_cache=True).logits[0, -1]


def top_logits(logits, count=5):
    """[[id, logit], ...] of the largest logits, best first."""
    top = torch.topk(logits, count)
    return [[int(i), round(float(v), 4)] for v, i in zip(top.values, top.indices)]


def versions():
    """Versions of the packages that decide the numbers."""
    import transformers

    # The part after "+" names a build, not a release.
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


def write_json(path, value):
    """One line per item of the outermost lists: readable diffs, compact numbers."""
    def dump(item):
        return json.dumps(item, ensure_ascii=False, separators=(", ", ": "))

    lines = []
    for key, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            body = ",\n".join("  " + dump(x) for x in item)
            lines.append(f' {dump(key)}: [\n{body}\n ]')
        else:
            lines.append(f" {dump(key)}: {dump(item)}")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def llama_config(reader):
    """transformers' LlamaConfig of a GGUF file of architecture llama without RoPE scaling."""
    from transformers import LlamaConfig

    def get(key):
        return reader.get_field(f"llama.{key}").contents()

    names = {t.name for t in reader.tensors}
    return LlamaConfig(
        vocab_size=get("vocab_size"),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base"),
        max_position_embeddings=get("context_length"),
        tie_word_embeddings="output.weight" not in names,
    )


def smollm_tokenizer(reader):
    """SmolLM2's tokenizer from a GGUF file (pre-tokenizer `smollm`: single digits, then GPT-2's)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = reader.get_field("tokenizer.ggml.pre").contents()
    if pre != "smollm":
        raise ValueError(f"pre-tokenizer {pre}, expected smollm")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    types = reader.get_field("tokenizer.ggml.token_type").contents()
    merges = [tuple(m.split(" ")) for m in reader.get_field("tokenizer.ggml.merges").contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    return tokenizer
