#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write tests/data/smollm2/golden.json: greedy tokens of SmolLM2 on five prompts.

The reference is transformers in fp32 on the dequantised weights of the Q4_1 GGUF that
tools/fetch_smollm2.sh fetches. Of each kind of text the first candidate is kept whose 32 greedy
tokens all win by more than 0.1, so that another order of summation cannot change them.
"""

import argparse
import pathlib

import gguf

import golden_support as support

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNT, MARGIN = 32, 0.1

CANDIDATES = {
    "prose": [
        "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he "
        "leadeth me beside the still waters. He restoreth my soul: he leadeth me in the paths of "
        "righteousness for his name's sake. Yea, though I walk through the valley of the shadow of "
        "death, I will fear no evil: for thou art with me; thy rod and thy staff they comfort me. "
        "Thou preparest a table before me in the presence of mine enemies: thou anointest my head "
        "with oil; my cup runneth over. Surely goodness and mercy shall follow me all the days of "
        "my life: and I will dwell in the house of the LORD for ever.\n\nThe LORD is my shepherd;",
        "Water moves around the Earth in a cycle. The heat of the sun turns water from the sea, from "
        "lakes and from rivers into vapour, which rises into the air. High above the ground the air "
        "is cold, and the vapour becomes small drops, which gather in clouds. When the drops grow "
        "heavy they fall as rain, or, where it is cold enough, as snow and hail. Some of the rain "
        "sinks into the soil, where the roots of plants drink it; some fills springs and wells; and "
        "the rest runs down the hills in streams, which join to form rivers. The rivers carry the "
        "water back to the sea, and there the cycle begins again. In short, the steps of the water "
        "cycle are",
        "In the beginning God created the heaven and the earth. And the earth was without form, and "
        "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
        "of the waters. And God said, Let there be light: and there was light.",
        "The sun is a star at the centre of the solar system. It is a hot ball of glowing gas that "
        "gives light and warmth to the planets around it. The Earth takes one year to go",
        "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
        "conceived in Liberty, and dedicated to the proposition that",
        "Our Father which art in heaven, Hallowed be thy name. Thy kingdom come. Thy will be done in "
        "earth, as it is in heaven.",
        "We the People of the United States, in Order to form a more perfect Union,",
    ],
    "code": [
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n",
        "def factorial(n):\n    if n == 0:\n        return 1\n    return n * factorial(n - 1)\n\n\n"
        "def fibonacci(n):\n",
        "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
        "import os\n\ndef list_files(path):\n    return [f for f in os.listdir(path) if "
        "os.path.isfile(os.path.join(path, f))]\n\ndef list_dirs(path):\n",
    ],
    "list": [
        "The days of the week are:\n1. Monday\n2. Tuesday\n3. Wednesday\n4.",
        "The months of the year, in order: January, February, March, April,",
        "Planets of the solar system by distance from the sun:\n- Mercury\n- Venus\n- Earth\n-",
        "one two three four five six seven eight nine ten eleven",
    ],
    "numbers": [
        "| n | n squared |\n|---|---|\n| 1 | 1 |\n| 2 | 4 |\n| 3 | 9 |\n| 4 | 16 |\n",
        "10, 20, 30, 40, 50, 60, 70, 80,",
        "2001, 2002, 2003, 2004, 2005, 2006, 2007,",
        "{\"id\": 1, \"name\": \"a\"}\n{\"id\": 2, \"name\": \"b\"}\n{\"id\": 3, \"name\": \"c\"}\n",
    ],
    "questions": [
        "English: Good morning. French: Bonjour.\nEnglish: Thank you. French: Merci.\nEnglish: "
        "Goodbye. French:",
        "Question: What is the capital of France?\nAnswer: Paris\n\nQuestion: What is the capital of "
        "Italy?\nAnswer: Rome\n\nQuestion: What is the capital of Spain?\nAnswer:",
        "Q: How many legs does a spider have?\nA: Eight\nQ: How many legs does a dog have?\nA: Four\n"
        "Q: How many legs does a bird have?\nA:",
        "Is water wet? Yes, naïve café owners say — “of course” 😀. Is fire cold? No,",
    ],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path,
                        default=ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/data/smollm2/golden.json")
    args = parser.parse_args()

    reader = gguf.GGUFReader(str(args.model))
    model = support.model_from_state(support.llama_config(reader), support.gguf_state_dict(reader))
    tokenizer = support.smollm_tokenizer(reader)
    prompts = []
    for kind, texts in CANDIDATES.items():
        for text in texts:
            ids = tokenizer.encode(text).ids
            greedy, margins, first = support.greedy(model, ids, COUNT)
            print(f"{kind:10} {len(ids):4} tokens  min margin {min(margins):.4f}"
                  f"  {tokenizer.decode(greedy, skip_special_tokens=False)!r}", flush=True)
            if min(margins) > MARGIN:
                prompts.append({
                    "kind": kind, "text": text, "prompt_ids": ids, "greedy_ids": greedy,
                    "greedy_text": tokenizer.decode(greedy, skip_special_tokens=False),
                    "margins": [round(m, 4) for m in margins],
                    "first_pos_top5": support.top_logits(first)})
                break
        else:
            raise SystemExit(f"no candidate of kind {kind} has clear margins")
    support.write_json(args.out, {
        "note": "fp32 arithmetic on the dequantised weights; 32 greedy tokens, end of text ignored",
        "gguf_sha256": support.sha256(args.model),
        "versions": support.versions(),
        "prompts": prompts})


if __name__ == "__main__":
    main()
