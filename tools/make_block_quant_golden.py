#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/block_quant_golden.bin: encoded blocks of every element type that Spin decodes
and the f32 values that ggml's Python reference makes of them.

    python3 -m venv build/venv && build/venv/bin/pip install gguf==0.19.0 numpy
    build/venv/bin/python tools/make_block_quant_golden.py tests/data/block_quant_golden.bin

Layout, little-endian: u32 number of records; then for each record a u64-prefixed type name, a
u64-prefixed string of encoded bytes, u64 number of values, the values as f32.
"""

import struct
import sys

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

T = gguf.GGMLQuantizationType
ROWS = 6  # blocks for the types of 32 values
SUPER_ROWS = 3  # blocks for the types of 256 values


def halves(rng, n):
    """All kinds of binary16 numbers, NaN left out (its payload is nobody's contract)."""
    special = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00]
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]
    return np.concatenate([np.array(special, dtype=np.uint16), bits])


def random_k_blocks(rng, kind, count):
    """gguf's Python cannot quantize these: random bytes, with scales of a sane size."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scales = rng.normal(0, 0.02, (count, 2)).astype(np.float16).view(np.uint8)
    if kind == T.Q6_K:
        blocks[:, 208:210] = scales[:, :2]
    else:
        blocks[:, 0:4] = scales
    return blocks


def records():
    rng = np.random.default_rng(20240229)
    f32 = rng.normal(0, 1, 64).astype(np.float32)
    yield "F32", f32.view(np.uint8), f32
    f16 = halves(rng, 200)
    yield "F16", f16.view(np.uint8), f16.view(np.float16).astype(np.float32)
    bf16 = rng.integers(0, 1 << 16, 200, dtype=np.uint16)
    bf16 = bf16[(bf16 & 0x7F80) != 0x7F80]
    yield "BF16", bf16.view(np.uint8), (bf16.astype(np.uint32) << 16).view(np.float32)
    for kind in (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0):
        values = rng.normal(0.1, 0.7, (ROWS, 32)).astype(np.float32)
        encoded = quantize(values, kind)
        yield kind.name, encoded, dequantize(encoded, kind)
    for kind in (T.Q4_K, T.Q5_K, T.Q6_K):
        encoded = random_k_blocks(rng, kind, SUPER_ROWS)
        yield kind.name, encoded, dequantize(encoded, kind)


def main():
    rows = list(records())
    with open(sys.argv[1], "wb") as out:
        out.write(struct.pack("<I", len(rows)))
        for name, encoded, values in rows:
            name, encoded = name.encode(), np.ascontiguousarray(encoded).tobytes()
            values = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
            out.write(struct.pack("<Q", len(name)) + name)
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            out.write(struct.pack("<Q", values.size) + values.tobytes())


if __name__ == "__main__":
    main()
