#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes seed inputs for the fuzz targets: OUT/TARGET/NNN.

    tools/make_fuzz_corpus.py --out build/fuzz/corpus [TARGET...]

A target's seeds come from one generator in SEEDS that yields bytes. Seeds are small, well formed or
wrong in one field, so that libFuzzer starts behind the first checks of a format. The output is the
same on every run.
"""

import argparse
import json
import pathlib
import random
import struct

EDGES_U64 = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63, 2**64 - 1)


# --- GGUF ---------------------------------------------------------------------------------------

# value type -> (number, struct code)
GGUF_SCALARS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
    "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}
GGUF_STRING, GGUF_ARRAY = 8, 9
# tensor type -> (number, values in a block, bytes of a block)
GGML_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "I8": (24, 1, 1),
    "BF16": (30, 1, 2),
}


def gguf_text(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind, value):
    """Type number and bytes of a value; a list is an array."""
    if isinstance(value, list):
        if kind == "string":
            body = b"".join(gguf_text(v) for v in value)
            number = GGUF_STRING
        else:
            number, code = GGUF_SCALARS[kind]
            body = b"".join(struct.pack("<" + code, v) for v in value)
        return struct.pack("<IIQ", GGUF_ARRAY, number, len(value)) + body
    if kind == "string":
        return struct.pack("<I", GGUF_STRING) + gguf_text(value)
    number, code = GGUF_SCALARS[kind]
    return struct.pack("<I" + code, number, value)


def gguf_file(values, tensors, alignment=32, version=3, counts=None):
    """values: [(key, kind, value)]; tensors: [(name, dims fastest first, type name)]."""
    tensor_count, value_count = counts or (len(tensors), len(values))
    out = b"GGUF" + struct.pack("<IQQ", version, tensor_count, value_count)
    for key, kind, value in values:
        out += gguf_text(key) + gguf_value(kind, value)
    data = b""
    for name, dims, kind in tensors:
        number, block, size = GGML_TYPES[kind]
        data += b"\0" * (-len(data) % alignment)
        out += gguf_text(name) + struct.pack("<I", len(dims))
        out += b"".join(struct.pack("<Q", d) for d in dims)
        out += struct.pack("<IQ", number, len(data))
        elements = 1
        for d in dims:
            elements *= d
        data += bytes(i % 251 for i in range(elements // block * size))
    if data:
        out += b"\0" * (-len(out) % alignment)
    return out + data


def gguf_seeds():
    values = [
        ("general.architecture", "string", "llama"),
        ("llama.block_count", "u32", 2),
        ("llama.rope.freq_base", "f32", 10000.0),
        ("tokenizer.ggml.tokens", "string", ["<s>", "a", "b", "ab"]),
        ("tokenizer.ggml.token_type", "i32", [3, 1, 1, 1]),
        ("tokenizer.ggml.scores", "f32", [0.0, -1.0, -2.0, -3.0]),
        ("tokenizer.ggml.add_bos_token", "bool", 1),
    ]
    tensors = [("token_embd.weight", (8, 4), "F32"), ("output_norm.weight", (8,), "BF16")]
    yield b"GGUF"
    yield gguf_file([], [])
    yield gguf_file(values, [])
    yield gguf_file(values, tensors)
    yield gguf_file(values, tensors, version=2)
    for kind in GGUF_SCALARS:
        yield gguf_file([("k", kind, 1), ("l", kind, [1, 0, 1])], [])
    for kind, (_, block, _) in GGML_TYPES.items():
        yield gguf_file([], [("t", (block * 2, 2), kind), ("u", (block,), kind)])
    for alignment in (1, 64, 4096):
        yield gguf_file([("general.alignment", "u32", alignment)], tensors, alignment)
    for alignment in (0, 3, 2**31):
        yield gguf_file([("general.alignment", "u32", alignment)], tensors)
    yield gguf_file([("general.alignment", "i32", 32)], tensors)
    for edge in EDGES_U64:
        yield gguf_file(values, tensors, counts=(edge, len(values)))
        yield gguf_file(values, tensors, counts=(len(tensors), edge))
        yield gguf_file([("k", "u8", 1)], []).replace(gguf_text("k"), struct.pack("<Q", edge) + b"k")
    rng = random.Random(1)
    good = gguf_file(values, tensors)
    for _ in range(40):  # one aligned word of a good file becomes an edge value
        place = rng.randrange(0, len(good) - 8, 4)
        edge = struct.pack("<Q", rng.choice(EDGES_U64))
        yield good[:place] + edge + good[place + 8:]


# --- safetensors --------------------------------------------------------------------------------


def safetensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors_seeds():
    def entry(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    good = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [4], 24, 32),
        "c": entry("F16", [], 32, 34),
        "d": entry("I64", [0], 34, 34),
        "e": entry("F4", [2], 34, 35),
        "f": entry("NEW", [1], 35, 37),
    }
    data = bytes(range(37))
    yield safetensors_file({})
    yield safetensors_file(good, data)
    yield safetensors_file(json.dumps(good).encode() + b"   ", data)
    yield safetensors_file(good, data + b"x")
    yield safetensors_file(good, data[:-1])
    yield safetensors_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                           b'"\\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', data[:8])
    for edge in EDGES_U64:
        yield safetensors_file(good, data, length=edge)
        yield safetensors_file({"a": entry("F32", [edge], 0, 4)}, b"abcd")
        yield safetensors_file({"a": entry("I8", [edge, edge], 0, edge)}, b"abcd")
        yield safetensors_file({"a": entry("I8", [4], edge, 4)}, b"abcd")
    yield safetensors_file(b"[" * 100 + b"]" * 100)
    yield safetensors_file({"a": [[[[[]]]]]})


# --- text ---------------------------------------------------------------------------------------


def byte_characters():
    """GPT-2's character for each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(extra)) for b in range(256)]


def tokenizer_json_seeds():
    split = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+")}}
    qwen = json.loads(json.dumps(split).replace("{1,3}", ""))
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}

    def sequence(*steps):
        return {"type": "Sequence", "pretokenizers": list(steps)}

    pre = {"gpt2": words, "smollm": sequence(digits, words), "llama3": sequence(split, bytes_only),
           "qwen2": sequence(qwen, bytes_only)}
    tokens = byte_characters() + ["he", "ll", "hell", "hello", "\u0120hello"]
    vocab = {text: i for i, text in enumerate(tokens)}
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]]
    added = [{"id": len(tokens) + i, "content": c, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": n, "special": not n} for i, (c, n) in enumerate([("<|im_end|>", False), ("<t>", True)])]
    for name, step in pre.items():
        document = {"added_tokens": added, "normalizer": {"type": "NFC"} if name == "qwen2" else None,
                    "pre_tokenizer": step, "decoder": bytes_only,
                    "post_processor": None, "model": {
                        "type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": name == "llama3",
                        "byte_fallback": False, "vocab": vocab,
                        "merges": [" ".join(m) for m in merges] if name == "gpt2" else merges}}
        if name == "llama3":
            document["post_processor"] = {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [len(tokens)], "tokens": []}}}
        yield json.dumps(document, ensure_ascii=False).encode()
    yield b'{"bos_token":{"content":"<s>"},"eos_token":"</s>","add_bos_token":true,"chat_template":"x"}'
    for name in ("gpt-2", "smollm", "qwen2", "llama-bpe", "default"):
        yield gguf_file([
            ("tokenizer.ggml.model", "string", "gpt2"),
            ("tokenizer.ggml.pre", "string", name),
            ("tokenizer.ggml.tokens", "string", tokens + ["<|im_end|>", "<0x41>", "[PAD]"]),
            ("tokenizer.ggml.token_type", "i32", [1] * len(tokens) + [3, 6, 5]),
            ("tokenizer.ggml.merges", "string", [" ".join(m) for m in merges]),
            ("tokenizer.ggml.bos_token_id", "u32", len(tokens)),
        ], [])


def detokenizer_seeds():
    yield b"\x00hello \xf0\x9f\x98\x80\xfe world"
    yield b"\x02lo w\xffhel\xfelo\xfe wor\xfeld"
    yield b"\x07a\xffab\xffb\xc3\xa9\xff\xc3\xfe\xa9ab\xc3\xa9\xed\xa0"


# --- HTTP ---------------------------------------------------------------------------------------

def http_parser_seeds():
    # The first byte seeds how the bytes are cut.
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for request in (
            b"GET /v1/models?x=1 HTTP/1.1\r\nHost: [::1]:8000\r\nAccept: */*\r\n\r\n",
            b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            head + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            head + b"Expect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
            chunked + b"2\r\n{}\r\n0\r\n\r\n",
            chunked + b'1;a=b;c="d\\"e"\r\n{\r\n01\r\n}\r\n000\r\nA: b\r\nC: d\r\n\r\n',
            chunked + b"0\r\n\r\n", chunked + b"0x10\r\n", chunked + b"-2\r\n", chunked + b"10000000000000000\r\n",
            head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            head + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
            head + b"A: b\r\n c\r\n\r\n", b"GET / HTTP/1.1\nHost: h\n\n", b"GET /\r\n"):
        for cut in (0, 77):
            yield bytes([cut]) + request


def json_request_seeds():
    # The first byte chooses the route: completions, chat, tokenize, detokenize.
    sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "n": 2,
                "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 1,
                "stop": ["a", "\\ud83d\\ude00"], "stop_token_ids": [1, 2], "min_tokens": 1,
                "max_tokens": 9, "ignore_eos": True, "logit_bias": {"5": 1.5}, "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    message = [{"role": "system", "content": "s"},
               {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for prompt in ("hi", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "", [], [1e300], [[[1]]]):
        yield b"\0" + json.dumps({"prompt": prompt, "logprobs": 2, "echo": True, **sampling}).encode()
    yield b"\1" + json.dumps({"messages": message, "logprobs": True, "top_logprobs": 3,
                              "chat_template_kwargs": {"enable_thinking": False}, **sampling}).encode()
    yield b"\1" + json.dumps({"messages": message, "tools": [{}], "tool_choice": "auto"}).encode()
    yield b"\2" + json.dumps({"prompt": "hi", "add_special_tokens": False}).encode()
    yield b"\2" + json.dumps({"messages": message, "return_token_strs": True}).encode()
    yield b"\3" + json.dumps({"tokens": [1, 2, 999]}).encode()
    for text in (b'{"prompt":"a","max_tokens":1e999}', b'{"prompt":"\\ud800"}', b'{"a":1,"a":2}',
                 b'{"prompt":"a","n":9007199254740993}', b'{"metadata":' + b"[" * 70, b"\xef\xbb\xbf{}"):
        yield b"\0" + text


# --- selection traces ---------------------------------------------------------------------------


def selection_trace_file(records, settings=b"quest:budget=64", magic=b"SPINTRC1", version=1,
                         shape=(2, 3, 8), settings_length=None):
    """records: [(sequence, step, layer, KV head, pages, count or None)]."""
    length = len(settings) if settings_length is None else settings_length
    out = magic + struct.pack("<5I", version, *shape, length) + settings
    for sequence, step, layer, head, pages, count in records:
        out += struct.pack("<5I", sequence, step, layer, head, len(pages) if count is None else count)
        out += struct.pack(f"<{len(pages)}I", *pages)
    return out


def selection_trace_seeds():
    good = [(1, step, layer, head, [0, 3 + step, 2**32 - 1], None)
            for step in range(2) for layer in range(2) for head in range(3)]
    yield b"SPINTRC1"
    yield selection_trace_file([])
    yield selection_trace_file([], settings=b"")
    yield selection_trace_file(good)
    yield selection_trace_file(good)[:-1]
    yield selection_trace_file(good, magic=b"SPINTRC2")
    yield selection_trace_file(good, version=2)
    yield selection_trace_file([(1, 0, 0, 0, [], None)])
    for pages in ([3, 3], [4, 3]):
        yield selection_trace_file([(1, 0, 0, 0, pages, None)])
    for layer, head in ((2, 0), (0, 3)):
        yield selection_trace_file([(1, 0, layer, head, [1], None)])
    for edge in (0, 1, 2**30, 2**31, 2**32 - 1):
        yield selection_trace_file(good, settings_length=edge)
        yield selection_trace_file([(1, 0, 0, 0, [1, 2], edge)])
        for place in range(3):
            shape = [2, 3, 8]
            shape[place] = edge
            yield selection_trace_file(good, shape=shape)


SEEDS = {
    "detokenizer": detokenizer_seeds,
    "gguf": gguf_seeds,
    "http_parser": http_parser_seeds,
    "json_request": json_request_seeds,
    "safetensors": safetensors_seeds,
    "selection_trace": selection_trace_seeds,
    "tokenizer_json": tokenizer_json_seeds,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("targets", nargs="*", help="default: all of " + ", ".join(sorted(SEEDS)))
    args = parser.parse_args()
    for target in args.targets or sorted(SEEDS):
        folder = args.out / target
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(SEEDS[target]()):
            (folder / f"{i:04d}").write_bytes(seed)


if __name__ == "__main__":
    main()
