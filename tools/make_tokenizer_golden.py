#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tokenizer/: golden ids of the `tokenizers` package on pseudo-random text.

    python3 tools/make_tokenizer_golden.py [--train CORPUS...]

Needs `pip install tokenizers`. Without --train the committed vocabularies are used and only
golden.json is written; with it three small vocabularies (GPT-2, SmolLM2 and Llama 3 style) are
trained on the given text files first. golden.json holds the alphabet and one FNV-1a hash of all ids
per batch of strings; tests/text/tokenizer_golden_test.cc generates the same strings (splitmix64) and
compares. The alphabet holds only code points assigned in Unicode 13, because the libraries behind
the two sides follow different versions of Unicode.
"""

import argparse
import json
import pathlib
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "tokenizer"
MASK = (1 << 64) - 1
BATCH = 1000

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# First and last code point of stretches that have been assigned throughout since Unicode 13.
RANGES = [
    (0x00, 0x1F), (0x20, 0x7E), (0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A), (0x7F, 0x9F),
    (0xA0, 0xFF), (0x100, 0x17F), (0x180, 0x24F), (0x250, 0x2AF), (0x2B0, 0x2FF),
    (0x300, 0x36F), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x400, 0x482), (0x483, 0x52F),
    (0x561, 0x586), (0x5B0, 0x5C7), (0x5D0, 0x5EA), (0x620, 0x64A), (0x64B, 0x669),
    (0x6F0, 0x6F9), (0x904, 0x939), (0x93C, 0x94D), (0x958, 0x96F), (0x985, 0x98C),
    (0x9DC, 0x9DD), (0xE01, 0xE3A), (0xE40, 0xE5B), (0xF40, 0xF47), (0xF71, 0xF84),
    (0x10A0, 0x10C5), (0x1100, 0x11FF), (0x1200, 0x1248), (0x13A0, 0x13F5), (0x1680, 0x169C),
    (0x17E0, 0x17E9), (0x180B, 0x180E), (0x1810, 0x1819), (0x1B05, 0x1B44), (0x1E00, 0x1EFF),
    (0x1F00, 0x1F15), (0x2000, 0x200F), (0x2010, 0x2027), (0x2028, 0x202F), (0x2030, 0x205F),
    (0x2070, 0x2071), (0x2074, 0x208E), (0x20A0, 0x20BF), (0x20D0, 0x20F0), (0x2100, 0x214F),
    (0x2150, 0x218B), (0x2190, 0x21FF), (0x2460, 0x249B), (0x2600, 0x26FF), (0x2776, 0x2793),
    (0x2ADC, 0x2ADC), (0x3000, 0x3029), (0x302A, 0x303F), (0x3041, 0x3096), (0x3099, 0x309F),
    (0x30A0, 0x30FF), (0x3105, 0x312F), (0x3220, 0x3247), (0x4E00, 0x4E80), (0x9000, 0x9080),
    (0xA000, 0xA08C), (0xAC00, 0xAC70), (0xD7A0, 0xD7A3), (0xE000, 0xE00F), (0xF900, 0xFA0D),
    (0xFB00, 0xFB06), (0xFB2A, 0xFB36), (0xFE00, 0xFE0F), (0xFE20, 0xFE2F), (0xFF01, 0xFF5E),
    (0xFFF9, 0xFFFD), (0x10000, 0x1000B), (0x10107, 0x10133), (0x10400, 0x1044F),
    (0x1D15E, 0x1D164), (0x1D165, 0x1D169), (0x1D400, 0x1D454), (0x1D7CE, 0x1D7FF),
    (0x1F130, 0x1F149), (0x1F300, 0x1F3FA), (0x1F3FB, 0x1F3FF), (0x1F600, 0x1F64F),
    (0x20000, 0x20010), (0x2F800, 0x2F80F), (0xE0100, 0xE010F),
]

WORDS = [
    " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000",
    "'s", "'S", "'t", "'re", "'RE", "'Ve", "'m", "'ll", "'LL", "'lL", "'d", "'D", "'", "''", "'\u017f",
    "\u017f", "\u212a", "s", "e", "l", "hello", " hello", "Hello", " world", "the", " the", " of",
    "ing", "0", "7", "12", "123", "1234", "12345678", "\u00b2", "\u00bd", "\u2167", "\u0663", ".", "...",
    "!", "?!", "==", "->", "/*", "()", "{\n", ";\n", "_", "__init__", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|begin_of_text|>", "<", "|", ">", "\u00e9", "e\u0301", "\u0301", "\u0323\u0307",
    "\u0307\u0323", "\u1e69", "\u0958", "\uac01", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u212b", "\u4f60\u597d",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\ufeff",
    "\u200b", "\u0085", "\u2028", "\u001c", "\u0000", "\ufffd",
]


class SplitMix64:
    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def make_string(seed, index):
    rng = SplitMix64(seed * 1000003 + index)
    out = []
    for _ in range(rng.next() % 24):
        if rng.next() % 2 == 0:
            out.append(WORDS[rng.next() % len(WORDS)])
            continue
        first, last = RANGES[rng.next() % len(RANGES)]
        for _ in range(1 + rng.next() % 4):
            out.append(chr(first + rng.next() % (last - first + 1)))
    return "".join(out)


def fnv1a(hash_, ids):
    for token in list(ids) + [0xFFFFFFFF]:
        for byte in token.to_bytes(4, "little"):
            hash_ = ((hash_ ^ byte) * 0x100000001B3) & MASK
    return hash_


def check_alphabet():
    for first, last in RANGES:
        for code in range(first, last + 1):
            category = unicodedata.category(chr(code))
            assert category not in ("Cn", "Cs"), hex(code)


def hashes(tokenizer, seed, count, parse_special):
    tokenizer.encode_special_tokens = not parse_special
    result = []
    for start in range(0, count, BATCH):
        strings = [make_string(seed, start + i) for i in range(BATCH)]
        hash_ = 0xCBF29CE484222325
        for encoding in tokenizer.encode_batch(strings, add_special_tokens=True):
            hash_ = fnv1a(hash_, encoding.ids)
        result.append(f"{hash_:016x}")
    return result


def train(name, pre, corpus, merges, alphabet, specials):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=merges + 256 + len(specials), initial_alphabet=alphabet,
                                  special_tokens=[AddedToken(s, special=True, normalized=False) for s in specials],
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return json.loads(tokenizer.to_str())


def train_all(files):
    corpus = [pathlib.Path(f).read_text(encoding="utf-8") for f in files]
    corpus += [make_string(99, i) for i in range(3000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    gpt2 = train("gpt2", byte_level, corpus, 900, alphabet, ["<|endoftext|>"])
    # The older spelling of merges.
    gpt2["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in gpt2["model"]["merges"]]

    # Like the real SmolLM2 vocabulary, this one lacks bytes that its corpus does not have.
    smollm = train("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
                   [c for c in corpus if "\u0085" not in c and "\x00" not in c], 900, [],
                   ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])

    split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=False)
    llama = train("llama3", pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
                  corpus, 900, alphabet, [])
    vocab = llama["model"]["vocab"]
    # Whole words that no merge makes: only ignore_merges finds them.
    for word in ["hello", "\u0120hello", "Hello", "\u0120world", "'LL", "12", "123", "__", "\u0120\u0120\u0120"]:
        if word not in vocab:
            vocab[word] = len(vocab)
    llama["model"]["ignore_merges"] = True
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    llama["added_tokens"] = [
        {"id": len(vocab) + i, "content": n, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True} for i, n in enumerate(names)]
    bos = names[0]
    llama["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {bos: {"id": bos, "ids": [len(vocab)], "tokens": [bos]}}}]}
    for name, document in [("gpt2", gpt2), ("smollm", smollm), ("llama3", llama)]:
        path = DATA / f"{name}.json"
        path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
        print(path.name, path.stat().st_size, "bytes,", len(document["model"]["vocab"]), "tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs="+", metavar="CORPUS", help="text files to train the small vocabularies on")
    parser.add_argument("--count", type=int, default=100_000, help="strings per tokenizer")
    options = parser.parse_args()
    check_alphabet()
    DATA.mkdir(parents=True, exist_ok=True)
    if options.train:
        train_all(options.train)
    cases = [("models/needle-29m/tokenizer.json", 1, options.count, False),
             ("models/needle-29m/tokenizer.json", 2, options.count // 10, True),
             ("tests/data/tokenizer/gpt2.json", 3, options.count, False),
             ("tests/data/tokenizer/smollm.json", 4, options.count, False),
             ("tests/data/tokenizer/llama3.json", 5, options.count, False),
             ("tests/data/tokenizer/llama3.json", 6, options.count // 10, True)]
    golden = {"tokenizers": tokenizers.__version__, "batch": BATCH, "ranges": RANGES, "words": WORDS, "cases": []}
    for path, seed, count, parse_special in cases:
        tokenizer = Tokenizer.from_file(str(ROOT / path))
        golden["cases"].append({"tokenizer": path, "seed": seed, "parse_special": parse_special,
                                "hashes": hashes(tokenizer, seed, count, parse_special)})
    out = DATA / "golden.json"
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    print(out.name, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
