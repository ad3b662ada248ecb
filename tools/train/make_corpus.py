#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepare the training data of needle-29m: filler text as token ids, and the word lists of keys.

  apt-get install bible-kjv bible-kjv-text wamerican
  bible -f 'gen1:1-rev22:21' | tools/train/make_corpus.py --words /usr/share/dict/american-english

Verse references in front of a line are removed. Writes corpus.u16 (little-endian token ids),
first_words.txt and second_words.txt to --out; a key is one word of each list joined by "-".
"""

import argparse
import pathlib
import re
import sys

import numpy as np
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = re.compile(r"^[1-3]?[A-Za-z]+\d+:\d+ ")
FIRST_WORDS, SECOND_WORDS = 900, 6800


def encode_lines(tokenizer, lines, block=1000):
    """Token ids of the text. A line ends with a newline, where the tokenizer splits anyway, so
    blocks of lines can be encoded one by one."""
    ids = []
    for start in range(0, len(lines), block):
        ids += tokenizer.encode("".join(lines[start:start + block])).ids
    return np.array(ids, dtype="<u2")


def pick_words(path, seed):
    """Two disjoint lists of plain lower-case words."""
    with open(path, encoding="utf-8") as file:
        words = sorted({w for w in map(str.strip, file) if re.fullmatch(r"[a-z]{3,11}", w)})
    need = FIRST_WORDS + SECOND_WORDS
    if len(words) < need:
        raise SystemExit(f"{path} has {len(words)} usable words, {need} are needed")
    order = np.random.default_rng(seed).permutation(len(words))[:need]
    chosen = [words[i] for i in order]
    return chosen[:FIRST_WORDS], chosen[FIRST_WORDS:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=argparse.FileType("r", encoding="utf-8"),
                        default=sys.stdin, help="plain text, one verse a line (default: stdin)")
    parser.add_argument("--words", default="/usr/share/dict/american-english")
    parser.add_argument("--tokenizer", default=str(ROOT / "models/needle-29m/tokenizer.json"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/train-data")
    args = parser.parse_args()

    lines = [REFERENCE.sub("", line.rstrip("\n")) + "\n" for line in args.text]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise SystemExit("the text is empty")
    args.out.mkdir(parents=True, exist_ok=True)
    ids = encode_lines(Tokenizer.from_file(args.tokenizer), lines)
    ids.tofile(args.out / "corpus.u16")
    for name, words in zip(("first_words", "second_words"), pick_words(args.words, args.seed)):
        (args.out / f"{name}.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    print(f"{len(lines)} lines, {len(ids)} tokens -> {args.out}")


if __name__ == "__main__":
    main()
