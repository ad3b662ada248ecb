#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train needle-29m by stages of growing length; --stages is a list of LENGTH:SECONDS.

  tools/train/train_needle.py --stages 512:40,1024:110 --out build/needle

Every step sees --tokens tokens whatever the length. The loss is cross entropy on answer tokens,
plus a tenth of the language-model loss on random positions while the length is at most 8,192.
Prints the answer loss every --log-every steps and, before the first and after every stage, exact
answers on the benchmark prompts of --eval; the same goes to OUT/log.jsonl.
"""

import argparse
import contextlib
import gzip
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

from needle_model import NeedleModel, load_weights, save_checkpoint
from prompts import PAD_ID, ROOT, TASKS, PromptFactory, question_count

LM_LENGTH, LM_WEIGHT, LM_POSITIONS = 8192, 0.1, 8192
WARM_UP, CLIP = 50, 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Samples(IterableDataset):
    """Endless batches; each worker process draws from a seed of its own."""

    def __init__(self, args, length):
        self.args, self.length = args, length

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        rng = np.random.default_rng([self.args.seed, self.length, worker.id if worker else 0])
        factory = PromptFactory(self.args.data, self.args.tokenizer)
        size = max(1, self.args.tokens // self.length)
        while True:
            ids, question = factory.batch(rng, size, self.length, question_count(self.length))
            yield torch.from_numpy(ids.astype(np.int16)), torch.from_numpy(question >= 0)


def batches(args, length):
    extra = dict(prefetch_factor=4, pin_memory=DEVICE == "cuda") if args.workers else {}
    return iter(DataLoader(Samples(args, length), batch_size=None, num_workers=args.workers, **extra))


def autocast():
    return torch.autocast("cuda", dtype=DTYPE) if DEVICE == "cuda" else contextlib.nullcontext()


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.model = NeedleModel().to(DEVICE)
        if args.resume:
            load_weights(self.model, args.resume)
        self.run_layer = self._compiled() if DEVICE == "cuda" and not args.no_compile else self._plain
        decayed, rest = [], []
        for name, parameter in self.model.named_parameters():
            matrix = parameter.ndim == 2 and "embed" not in name
            (decayed if matrix else rest).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [dict(params=decayed, weight_decay=0.1), dict(params=rest, weight_decay=0.0)],
            lr=args.lr, betas=(0.9, 0.95), fused=DEVICE == "cuda")
        self.step, self.spent = 0, 0.0

    @staticmethod
    def _plain(layer, x, cos, sin):
        with autocast():
            return layer(x, cos, sin)

    def _compiled(self):
        return torch.compile(self._plain, dynamic=False)

    def loss(self, ids, answers):
        """(loss to minimise, answer loss) of one batch."""
        ids = ids.to(DEVICE, non_blocking=True).long()
        answers = answers.to(DEVICE, non_blocking=True)
        hidden = self.model.hidden(ids[:, :-1], DTYPE, self.run_layer)
        labels = ids[:, 1:]
        answer = F.cross_entropy(self.model.logits(hidden[answers]), labels[answers])
        if ids.shape[1] - 1 > LM_LENGTH:
            return answer, answer.detach()
        at = torch.randint(labels.numel(), (LM_POSITIONS,), device=labels.device)
        plain = F.cross_entropy(self.model.logits(hidden.flatten(0, 1)[at]), labels.flatten()[at])
        return answer + LM_WEIGHT * plain, answer.detach()

    def update(self, batch):
        loss, answer = self.loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return answer

    def set_rate(self, progress):
        """Warm-up by steps, then a cosine over the planned time down to a tenth."""
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rate = self.args.lr * min(1.0, (self.step + 1) / WARM_UP) * cosine
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def stage(self, length, seconds, total, source, mixed, log):
        """Train at one length for `seconds`; every third step takes a shorter length of `mixed`."""
        for each in (source, *mixed):  # compile outside the clock
            self.loss(*next(each))[0].backward()
            self.optimizer.zero_grad(set_to_none=True)
        synchronize()
        start, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            rate = self.set_rate((self.spent + elapsed) / total)
            if mixed and steps % 3 == 2:
                self.update(next(mixed[steps // 3 % len(mixed)]))
            answer = self.update(next(source))
            steps += 1
            self.step += 1
            if steps == 1 or self.step % self.args.log_every == 0:
                log(kind="loss", length=length, step=self.step, answer_loss=round(answer.item(), 4),
                    lr=f"{rate:.2e}", seconds=round(time.perf_counter() - start, 1))
        synchronize()
        elapsed = time.perf_counter() - start
        self.spent += elapsed
        tokens = steps * max(1, self.args.tokens // length) * length
        log(kind="stage", length=length, steps=steps, seconds=round(elapsed, 1),
            million_tokens=round(tokens / 1e6, 1), tokens_per_second=round(tokens / elapsed))


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def evaluate(trainer, path, tokenizer, rows=16):
    """{task: [exact, prompts]} on a file of benchmark prompts (gzipped JSON lines).

    All answer tokens being the arg max, with the right answer fed in, is the same as greedy
    decoding giving the whole answer. Padding behind an answer cannot be seen by it.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in file]
    counts = {task: [0, 0] for task in TASKS}
    for start in range(0, len(items), rows):
        part = items[start:start + rows]
        prompts = [tokenizer.encode(item["prompt"]).ids for item in part]
        longest = max(len(p) + len(i["answer_ids"]) for p, i in zip(prompts, part))
        ids = torch.full((len(part), longest), PAD_ID)
        for row, (prompt, item) in enumerate(zip(prompts, part)):
            full = prompt + item["answer_ids"]
            ids[row, :len(full)] = torch.tensor(full)
        hidden = trainer.model.hidden(ids.to(DEVICE), DTYPE, trainer._plain)
        for row, (prompt, item) in enumerate(zip(prompts, part)):
            answer = torch.tensor(item["answer_ids"], device=DEVICE)
            at = hidden[row, len(prompt) - 1:len(prompt) - 1 + len(answer)]
            counts[item["task"]][0] += bool((trainer.model.logits(at).argmax(-1) == answer).all())
            counts[item["task"]][1] += 1
    return counts


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="512:40,1024:110")
    parser.add_argument("--mix", default="", help="shorter lengths every third step comes from")
    parser.add_argument("--tokens", type=int, default=262144, help="tokens a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="processes that make samples")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--resume", help="checkpoint (folder, safetensors or GGUF) to start from")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "build/train-data")
    parser.add_argument("--tokenizer", default=str(ROOT / "models/needle-29m/tokenizer.json"))
    parser.add_argument("--eval", type=pathlib.Path,
                        default=ROOT / "tests/data/ruler/ruler_1k.jsonl.gz")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/needle")
    return parser.parse_args()


def main():
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    file = open(args.out / "log.jsonl", "w", encoding="utf-8")

    def log(**entry):
        line = json.dumps(entry)
        print(line, flush=True)
        print(line, file=file, flush=True)

    trainer = Trainer(args)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    log(kind="start", device=name, torch=torch.__version__, stages=args.stages,
        parameters=sum(p.numel() for p in trainer.model.parameters()))
    tokenizer = Tokenizer.from_file(args.tokenizer)

    def report(after):
        counts = evaluate(trainer, args.eval, tokenizer)
        log(kind="exact", after=after, exact=sum(c[0] for c in counts.values()),
            of=sum(c[1] for c in counts.values()), per_task=counts)

    report("start")
    stages = [(int(length), float(seconds)) for length, seconds in
              (stage.split(":") for stage in args.stages.split(","))]
    total = sum(seconds for _, seconds in stages)
    mix = [int(length) for length in args.mix.split(",") if length]
    for length, seconds in stages:
        mixed = [batches(args, shorter) for shorter in mix if shorter < length]
        trainer.stage(length, seconds, total, batches(args, length), mixed, log)
        report(f"{length}:{seconds:g}")
    save_checkpoint(trainer.model, args.out)


if __name__ == "__main__":
    main()
