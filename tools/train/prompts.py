#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Retrieval prompts in the style of RULER, built directly as token ids.

Task definitions (needle sentence, noise sentence, question templates, numbers of keys, values and
queries) follow RULER (NVIDIA, Apache-2.0). A training sample carries several questions after one
text, each followed by its answer; with one question it is a benchmark prompt.

Pieces are encoded one by one and joined only where the tokenizer splits text anyway, so the ids of
a sample are those of its text; run this file to check that.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAD_ID, END_ID = 8192, 8194
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
LETTERS = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
HEX = np.array(list("0123456789abcdef"))
HOPS = 4  # a chain of assignments names HOPS + 1 variables
# Part of the corpus that training never shows; evaluation texts come from it.
HELD_OUT = 0.08


@dataclasses.dataclass(frozen=True)
class Task:
    """One needle task: kinds of key and value, filler, and how many of each a prompt has."""
    keys: str
    values: str
    filler: str
    key_count: int = 1
    values_per_key: int = 1
    keys_per_question: int = 1


NEEDLE_TASKS = {
    "single_1": Task("words", "numbers", "noise"),
    "single_2": Task("words", "numbers", "text"),
    "single_3": Task("words", "uuids", "text"),
    "multikey_1": Task("words", "numbers", "text", key_count=4),
    "multikey_2": Task("words", "numbers", "needles"),
    "multikey_3": Task("uuids", "uuids", "needles"),
    "multivalue": Task("words", "numbers", "text", values_per_key=4),
    "multiquery": Task("words", "numbers", "text", key_count=4, keys_per_question=4),
}
TASKS = [*NEEDLE_TASKS, "vt"]
# Tasks that follow pointers are learned last and get most of the samples.
WEIGHTS = dict(single_1=0.6, single_2=0.6, single_3=1.0, multikey_1=0.6, multikey_2=1.2,
               multikey_3=1.5, multivalue=2.5, multiquery=1.2, vt=4.0)


def question_count(length):
    """Questions in a training sample: 4 at 512 tokens, 8 at 1K, 64 from 8K to 32K, 256 at 128K."""
    return max(4, min(64, length // 128), min(256, length // 512))


@dataclasses.dataclass
class Plan:
    """The parts of a sample before filler is added: lists of token ids."""
    head: list
    needles: list          # pairs: (form after a space, form after a newline), in order
    filler: str
    questions: list        # pairs: (question, answer)
    distractor: object = None   # makes one more needle that nobody asks for


class PromptFactory:
    """Builds samples. Thread: one factory a process (it caches encodings)."""

    def __init__(self, data, tokenizer, held_out=False):
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        corpus = np.fromfile(pathlib.Path(data) / "corpus.u16", dtype="<u2").astype(np.int64)
        cut = int(len(corpus) * (1 - HELD_OUT))
        self._corpus = corpus[cut:] if held_out else corpus[:cut]
        self._first, self._second = (
            (pathlib.Path(data) / f"{n}_words.txt").read_text().split() for n in ("first", "second"))
        self._dot = self._one(".")
        self._dot_newline = self._one(".\n")
        self._newline = self._one("\n")
        self._ends = np.flatnonzero(self._is_end(self._corpus)) + 1
        self._noise = np.array(self.encode(NOISE))
        vocabulary = self._tokenizer.get_vocab()
        self._is_word = np.zeros(max(vocabulary.values()) + 1, bool)
        for token, index in vocabulary.items():
            letters = token.removeprefix("\u0120")
            self._is_word[index] = letters.isascii() and letters.isalpha()

    def encode(self, text):
        return self._tokenizer.encode(text).ids

    def decode(self, ids):
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _one(self, text):
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is not one token")
        return ids[0]

    def _is_end(self, ids):
        return (ids == self._dot) | (ids == self._dot_newline)

    # --- keys and values -----------------------------------------------------------------------

    def _random(self, rng, kind):
        if kind == "numbers":
            return str(rng.integers(10 ** 6, 10 ** 7))
        if kind == "uuids":
            digits = "".join(HEX[rng.integers(0, 16, 31)])
            return "-".join((digits[:8], digits[8:12], "4" + digits[12:15], digits[15:19],
                             digits[19:]))
        first, second = rng.integers(len(self._first)), rng.integers(len(self._second))
        return f"{self._first[first]}-{self._second[second]}"

    def _needle(self, kind, key, value):
        text = f"One of the special magic {kind} for {key} is: {value}.\n"
        return self.encode(" " + text), self.encode(text)

    # --- plans ---------------------------------------------------------------------------------

    def _needle_plan(self, rng, length, task, questions):
        single = task.keys_per_question * task.values_per_key == 1
        count = max(task.key_count, task.keys_per_question)
        if questions > 1:
            count = max(count, min(questions, max(1, length // 128)))
        keys = []
        while len(keys) < count:
            key = self._random(rng, task.keys)
            if key not in keys:
                keys.append(key)
        facts = [(key, self._random(rng, task.values)) for key in keys
                 for _ in range(task.values_per_key)]
        facts = [facts[i] for i in rng.permutation(len(facts))]
        values = {key: [v for k, v in facts if k == key] for key in keys}  # in order of the text

        noun = task.values[:-1] if single else task.values
        start = f"A special magic {noun} is" if single else f"Some special magic {noun} are"
        head = (f"{start} hidden within the following text. Make sure to memorize it. I will quiz "
                f"you about the {noun} afterwards.\n")
        asked = rng.permutation(len(keys))
        groups = [[keys[i] for i in asked[s:s + task.keys_per_question]]
                  for s in range(0, len(keys) - task.keys_per_question + 1, task.keys_per_question)]
        return Plan(
            head=self.encode(head),
            needles=[self._needle(task.values, key, value) for key, value in facts],
            filler=task.filler,
            questions=[self._needle_question(noun, single, group, values)
                       for group in groups[:questions]],
            distractor=lambda: self._needle(task.values, self._random(rng, task.keys),
                                            self._random(rng, task.values))[1])

    def _needle_question(self, noun, single, keys, values):
        names = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
        if single:
            ask, verb = f"What is the special magic {noun}", "is"
        else:
            ask, verb = f"What are all the special magic {noun}", "are"
        question = (f"\n{ask} for {names} mentioned in the provided text? The special magic {noun} "
                    f"for {names} mentioned in the provided text {verb}")
        if len(keys) > 1:
            # Naming each key again spares the model from counting.
            answer = ", ".join(f"{key}: {values[key][0]}" for key in keys)
        else:
            answer = ", ".join(values[keys[0]])
        return self.encode(question), self.encode(f" {answer}.") + [END_ID]

    def _chain_plan(self, rng, length, questions):
        count = 1 if questions == 1 else min(questions, max(1, length // 192))
        names, chains = set(), []
        for _ in range(count):
            chain = []
            while len(chain) < HOPS + 1:
                name = "".join(LETTERS[rng.integers(0, 26, 5)])
                if name not in names:
                    names.add(name)
                    chain.append(name)
            chains.append((chain, str(rng.integers(10000, 99999))))
        lines = []
        for chain, value in chains:
            # Sorted random times keep the order inside a chain and mix the chains.
            sources = [value] + [f"VAR {name}" for name in chain[:-1]]
            lines += zip(np.sort(rng.random(len(chain))), chain, sources)
        pieces = [self.encode(f"VAR {name} = {source}\n") for _, name, source in sorted(lines)]
        asked = [chains[i] for i in rng.permutation(count)[:questions]]
        return Plan(
            head=self.encode("Memorize and track the chain(s) of variable assignment hidden in the "
                             "following text.\n\n"),
            needles=[(piece, piece) for piece in pieces],
            filler="noise",
            questions=[self._chain_question(chain, value) for chain, value in asked])

    def _chain_question(self, chain, value):
        question = (f"\nQuestion: Find all variables that are assigned the value {value} in the text "
                    f"above. Answer: According to the chain(s) of variable assignment in the text "
                    f"above, {len(chain)} variables are assigned the value {value}, they are:")
        return self.encode(question), self.encode(" " + " ".join(chain)) + [END_ID]

    # --- filler --------------------------------------------------------------------------------

    def _passage(self, rng, count):
        """`count` tokens of the corpus from the start of a sentence, wrapping around."""
        start = int(rng.choice(self._ends[:-1]))
        return np.take(self._corpus, np.arange(start, start + count), mode="wrap")

    def _in_noise(self, rng, room, needles):
        blocks = max(1, room // len(self._noise))
        places = np.sort(rng.integers(0, blocks + 1, len(needles)))
        parts, done = [], 0
        for place, needle in zip(places, needles):
            parts += [np.tile(self._noise, place - done), needle[1]]
            done = place
        return np.concatenate([*parts, np.tile(self._noise, blocks - done)])

    def _in_text(self, rng, room, needles):
        text = self._passage(rng, room - 1)
        ends = np.flatnonzero(self._is_end(text)) + 1
        places = np.sort(rng.choice(ends if len(ends) else [0], len(needles)))
        parts, done, last = [], 0, self._dot_newline  # the head ends with a newline
        for place, (after_space, after_newline) in zip(places, needles):
            if place > done:
                parts.append(text[done:place])
                last = text[place - 1]
            parts.append(after_space if last == self._dot else after_newline)
            done, last = place, self._dot_newline
        rest = text[done:]
        words = np.flatnonzero(self._is_word[rest])
        if len(words):
            # After a word the question's newline is a token of its own.
            parts += [rest[:words[-1] + 1], [self._newline]]
        return np.concatenate(parts)

    def _in_needles(self, rng, room, needles, distractor):
        others, used = [], 0
        while True:
            other = distractor()
            if used + len(other) > room:
                break
            others.append(other)
            used += len(other)
        count = len(others) + len(needles)
        ours = set(rng.choice(count, len(needles), replace=False).tolist())
        mine, theirs = iter(needles), iter(others)
        return np.concatenate([next(mine)[1] if i in ours else next(theirs) for i in range(count)])

    # --- samples -------------------------------------------------------------------------------

    def sample(self, rng, length, task, questions=1):
        """(ids [length + 1], question [length]).

        question[p] is the number of the question whose answer token is ids[p + 1], or -1.
        """
        if task == "vt":
            plan = self._chain_plan(rng, length, questions)
        else:
            plan = self._needle_plan(rng, length, NEEDLE_TASKS[task], questions)

        def room():
            fixed = len(plan.head) + sum(len(n[0]) for n in plan.needles)
            return length + 1 - fixed - sum(len(q) + len(a) for q, a in plan.questions)

        while room() < 0 and len(plan.questions) > 1:
            plan.questions.pop()
        if plan.filler == "needles":
            context = self._in_needles(rng, room(), plan.needles, plan.distractor)
        elif room() < len(self._noise):
            context = np.concatenate([n[1] for n in plan.needles])
        elif plan.filler == "noise":
            context = self._in_noise(rng, room(), plan.needles)
        else:
            context = self._in_text(rng, room(), plan.needles)

        ids = np.full(length + 1, PAD_ID, np.int64)
        question_of = np.full(length, -1, np.int16)
        at = 0
        for part in (plan.head, context):
            part = part[:length + 1 - at]
            ids[at:at + len(part)] = part
            at += len(part)
        for number, (question, answer) in enumerate(plan.questions):
            if number == 0:
                question = question[1:]  # the text already ends with a newline
            if at + len(question) + len(answer) > length + 1:
                break
            ids[at:at + len(question)] = question
            at += len(question)
            ids[at:at + len(answer)] = answer
            question_of[at - 1:at - 1 + len(answer)] = number
            at += len(answer)
        return ids, question_of

    def batch(self, rng, size, length, questions, task=None):
        """(ids [size, length + 1], question [size, length]); tasks are drawn by WEIGHTS unless
        one is named, and every seventh sample or so has one question as in the benchmark."""
        names, weights = list(WEIGHTS), np.array(list(WEIGHTS.values()))
        rows = []
        for _ in range(size):
            name = task or names[rng.choice(len(names), p=weights / weights.sum())]
            many = questions > 1 and rng.random() >= 0.15
            rows.append(self.sample(rng, length, name,
                                    int(rng.integers(2, questions + 1)) if many else 1))
        return tuple(np.stack(column) for column in zip(*rows))


def check(factory, samples):
    """Every sample's ids are the encoding of its text, and every task yields answers."""
    rng = np.random.default_rng(0)
    for task in TASKS:
        answers = 0
        for number in range(samples):
            length = int(rng.choice([512, 1024, 2048]))
            questions = 1 if number % 2 else question_count(length)
            ids, question_of = factory.sample(rng, length, task, questions)
            body = ids[:np.flatnonzero(ids != PAD_ID)[-1] + 1].tolist()
            if factory.encode(factory.decode(body)) != body:
                raise SystemExit(f"{task}: sample {number} is not token-exact")
            answers += int(question_of.max()) + 1
        print(f"{task:12} {samples} samples token-exact, {answers / samples:.1f} questions each")


def main():
    parser = argparse.ArgumentParser(description="Check that generated prompts are token-exact.")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "build/train-data")
    parser.add_argument("--tokenizer", default=str(ROOT / "models/needle-29m/tokenizer.json"))
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--show", metavar="TASK", help="print one benchmark prompt of this task")
    args = parser.parse_args()
    factory = PromptFactory(args.data, args.tokenizer)
    if args.show:
        ids, _ = factory.sample(np.random.default_rng(), 512, args.show)
        print(factory.decode(i for i in ids if i != PAD_ID))
    else:
        check(factory, args.samples)


if __name__ == "__main__":
    main()
