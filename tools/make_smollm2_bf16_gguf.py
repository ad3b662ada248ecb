#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a BF16 GGUF of SmolLM2 from its Q4_1 file, for comparing speed on equal weights.

Metadata is copied; matrices are dequantised and rounded to bf16, norms stay F32. The row order of
Q and K is that of the source file.
"""

import argparse
import pathlib

import gguf
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def copy_metadata(reader, writer):
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if name.startswith(skipped):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ROOT / "build/models"
    parser.add_argument("--model", type=pathlib.Path,
                        default=models / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=pathlib.Path,
                        default=models / "SmolLM2-135M-Instruct.BF16.gguf")
    args = parser.parse_args()
    if not args.model.exists():
        raise SystemExit(f"{args.model} is missing; run tools/fetch_smollm2.sh first")

    reader = gguf.GGUFReader(str(args.model))
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(str(args.out), architecture)
    copy_metadata(reader, writer)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(data, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"wrote {args.out} ({args.out.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
