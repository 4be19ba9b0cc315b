"""Train a reference model: `python -m training recall-rope --out FOLDER`.

Run the command again with the same folder to go on where it stopped (a checkpoint is kept there),
until the recipe's minutes are spent. The folder then holds the model as Hugging Face lays it out,
and `log.jsonl` with everything that was measured on the way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from baton.evals.context import KINDS, TEXT_KINDS
from baton.evals.facts import FAMILIES
from training.data import Batch, Stream, load_texts
from training.export import export, load
from training.measure import checks, measure
from training.model import Model
from training.optim import Optimiser
from training.recipes import RECIPES, Recipe, Stage


class Run:
    """One model in training, and what a checkpoint of it holds."""

    def __init__(self, recipe: Recipe, out: Path, device: torch.device, fuse: bool) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.out, self.device = recipe, out, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Model(recipe.shape).to(device)
        self.optimiser = Optimiser(self.model, recipe.rates)
        self.step, self.stage, self.spent, self.tokens = 0, 0, 0.0, 0
        self.first = 0  # step at which the optimiser started
        if (out / "state.pt").exists():
            self._load()
        if fuse:
            torch._dynamo.config.suppress_errors = True  # what does not compile runs eagerly
            self.model.fuse()
        weight = torch.zeros(len(KINDS), device=device)
        weight[len(KINDS) - len(FAMILIES) :] = 1.0
        weight[KINDS.index("copy")] = 0.5
        self.answer_weight = weight
        self.is_text = torch.tensor([k in TEXT_KINDS for k in KINDS], device=device).float()

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return self.spent / (60 * self.recipe.minutes)

    @property
    def now(self) -> Stage:
        """The stage it is in."""
        return self.recipe.stages[self.stage]

    def factor(self) -> float:
        """Of the rates: linear warm-up, constant, linear to zero at the end."""
        left = min(1.0, max(0.0, (1 - self.share) / self.recipe.decay))
        return min(1.0, (self.step - self.first + 1) / self.recipe.warm_up) * left

    def loss(
        self, states: torch.Tensor, tokens: torch.Tensor, kind: torch.Tensor, ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of predicting `ahead` tokens on, and its sums and counts by kind `[2, kinds]`."""
        target, kind = tokens.roll(-ahead, 1).flatten(), kind.roll(-ahead, 1).clone()
        kind[:, -ahead:] = 0
        kind = kind.flatten().long()
        each = F.cross_entropy(self.model.head(states).float(), target, reduction="none")

        def mean(weight: torch.Tensor) -> torch.Tensor:
            return (each * weight).sum() / weight.sum().clamp(min=1)

        loss = mean(self.answer_weight[kind]) + self.now.text * mean(self.is_text[kind])
        alone = torch.stack((each.detach(), torch.ones_like(each)))
        return loss, alone @ F.one_hot(kind, len(KINDS)).to(alone.dtype)

    def train(self, batch: Batch) -> torch.Tensor:
        """One step; sums and counts of the loss by kind, on the device."""
        tokens = batch["tokens"].to(self.device, non_blocking=True).long()
        kind = batch["kind"].to(self.device, non_blocking=True)
        hidden, ahead, counts = self.model(tokens, self.dtype)
        loss, total = self.loss(hidden, tokens, kind, 1)
        further, _ = self.loss(ahead, tokens, kind, 2)
        (loss + self.now.mtp * further).backward()
        self.optimiser.step(self.factor())
        self.model.balance(counts, self.recipe.balance)
        self.step += 1
        self.tokens += tokens.numel()
        return total

    def start_from(self, folder: Path) -> None:
        """Take up an exported model where its log ends; the optimiser starts anew."""
        load(self.model, folder)
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        at = [json.loads(line) for line in lines][-1]
        self.step, self.stage = at["step"], at["stage"]
        self.spent, self.tokens = 60 * at["minutes"], at["tokens"]
        self.first = self.step
        (self.out / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def save(self) -> None:
        """Write the checkpoint; a stop in the middle leaves the one before."""
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimiser.state(),
            "at": [self.step, self.stage, self.spent, self.tokens, self.first],
        }  # fmt: skip
        torch.save(state, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def _load(self) -> None:
        state = torch.load(self.out / "state.pt", map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimiser.load(state["optimiser"])
        self.step, self.stage, self.spent, self.tokens, self.first = state["at"]
        print(f"going on from step {self.step}, {self.spent / 60:.1f} minutes in", flush=True)

    def log(self, **entry: Any) -> None:
        """Append to the log."""
        at = {"step": self.step, "stage": self.stage, "minutes": round(self.spent / 60, 2)}
        entry = {**at, "tokens": self.tokens, **entry}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Trainer:
    """Drives a run: stages, checks, checkpoints, and what is printed."""

    def __init__(self, run: Run, every: float) -> None:
        self.run, self.every = run, every
        self.texts = load_texts("validation")
        self.contexts: dict[tuple[int, int], list[Batch]] = {}  # by stage and length
        self.stream = Stream(run.recipe, run.step)
        self.stream.stage.value = run.stage

    def go(self, minutes: float, workers: int) -> None:
        """Train until the budget or `minutes` of this command are spent."""
        run, start = self.run, time.monotonic()
        batches = self.stream.batches(workers)
        since, seen, total = time.monotonic(), run.tokens, torch.zeros(2, len(KINDS))
        checked, warm = since, False
        while run.share < 1 and time.monotonic() - start < 60 * minutes:
            total = run.train(next(batches)) + total.to(run.device)
            if run.step % 20:
                continue
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            if warm:  # the first steps of a command compile: they are not training time
                run.spent += now - since
            since, warm = now, True
            self._advance()
            if now - checked > self.every:
                rate = (run.tokens - seen) / (now - checked)
                self._report(total.cpu(), rate)
                run.save()
                since = checked = time.monotonic()
                seen, total = run.tokens, torch.zeros(2, len(KINDS))
        run.spent += time.monotonic() - since
        run.save()

    def _advance(self, accuracy: float = 0.0) -> None:
        run = self.run
        stage = run.now
        last = run.stage == len(run.recipe.stages) - 1
        if not last and (run.share >= stage.until or accuracy >= stage.gate):
            run.stage += 1
            self.stream.stage.value = run.stage
            print(f"stage {run.stage} from here on", flush=True)

    def _report(self, total: torch.Tensor, rate: float) -> None:
        """Print and log the losses since the last time and what the model can do now."""
        run = self.run
        mean = (total[0] / total[1].clamp(min=1)).tolist()
        losses = {k: round(x, 3) for k, x in zip(KINDS, mean, strict=True) if x and k != "none"}
        stage = run.now
        found = self.check([max(stage.lengths)])
        exact = found[max(stage.lengths)]["exact"]
        print(
            f"{run.share:4.0%} {run.spent / 60:5.1f} min  step {run.step:>6}  stage {run.stage}  "
            f"{rate / 1e3:7.0f}K tokens/s  loss {losses}\n"
            f"      at {max(stage.lengths)}: {exact}",
            flush=True,
        )
        run.log(rate=round(rate), factor=run.factor(), loss=losses, check=found)
        self._advance(exact.get("ask", 0.0))

    def check(self, lengths: list[int]) -> dict[int, Any]:
        """Validation at these lengths."""
        run, found = self.run, {}
        for length in lengths:
            key = run.stage, length
            if key not in self.contexts:
                tokens = run.recipe.check_tokens
                self.contexts[key] = checks(run.recipe, run.now.mix, length, self.texts, tokens)
            found[length] = measure(run.model, self.contexts[key], run.dtype, run.device)
        return found


def count(text: str) -> int:
    """At least 1; argparse names what is not."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0, likewise."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def flags() -> argparse.Namespace:
    """The command line; ends the program for one that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, log, model")
    parser.add_argument(
        "--minutes", type=positive, default=1e9, help="stop after so many, go on later"
    )
    parser.add_argument("--every", type=positive, default=30.0, help="seconds between checks")
    cores = os.cpu_count() or 2
    parser.add_argument("--workers", type=count, default=max(1, min(14, cores - 2)))
    parser.add_argument("--budget", type=positive, help="minutes in all, instead of the recipe's")
    parser.add_argument("--rates", type=positive, nargs=2, metavar=("MUON", "ADAM"))
    parser.add_argument("--start", type=Path, help="exported folder to go on from, elsewhere")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    if options.start is not None and not (options.start / "log.jsonl").is_file():
        parser.error(f"--start: {options.start} is no exported folder: it has no log.jsonl")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: cannot make the folder {options.out}: {error.strerror}")
    return options


def main() -> None:
    """Parse the command line and train."""
    options = flags()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = RECIPES[options.recipe]
    recipe = replace(
        recipe,
        minutes=options.budget or recipe.minutes,
        rates=tuple(options.rates or recipe.rates),
    )
    run = Run(recipe, options.out, device, fuse=not options.eager and device.type == "cuda")
    if options.start and not run.step:
        run.start_from(options.start)
    size = sum(p.numel() for p in run.model.parameters())
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{recipe.name}: {size / 1e6:.2f}M parameters on {card}, torch {torch.__version__}")
    run.log(recipe=asdict(recipe), parameters=size, card=card, torch=torch.__version__)
    trainer = Trainer(run, options.every)
    trainer.go(options.minutes, options.workers)
    export(run.model, recipe, options.out)
    load(run.model, options.out)  # what is measured last is what is in the folder
    found = trainer.check(list(recipe.check))
    for length, result in found.items():
        print(length, json.dumps(result))
    run.log(final=found)
