"""A training run: answers, then training steps until the time is over, and now and then the held-out prompts.

    load ── answer prompts ── [ hidden states of a batch ── training step ] .. ── held-out prompts ── save ── ..
            ANSWERS_SHARE                        the rest of the time limit

Answers are kept as soon as they are there, and the draft with every measurement, so that a run which ends early loses
little, and `--resume` goes on.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.config import Settings, SpecSettings, facts_of
from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.speculative.methods import method_named
from overlap_spec.train_draft import samples as of_samples, state
from overlap_spec.train_draft.answers import Asked, FeatureRing, LocalEngine, Say
from overlap_spec.train_draft.dflash import NUM_LAYERS, DFlash, DSpark
from overlap_spec.train_draft.eagle3 import Eagle3, read_head
from overlap_spec.train_draft.head import Batch, Frozen, Head, accept_length
from overlap_spec.train_draft.prompts import PromptFile
from overlap_spec.train_draft.samples import LEAST_ANSWER, Sample
from overlap_spec.train_draft.steps import BatchSteps

ANSWERS_SHARE = 0.3  # of the time, at most
TEMPERATURES = (0.0,) * 11 + (0.7,) * 5 + (1.0,) * 4  # of answers, in turn
BATCH_ROWS = {"cpu": 1024, "cuda": 16384}
WIDE = 2048  # hidden sizes above it get half as many rows, and smaller steps
RATE = 3e-3  # of learning
WARM_UP, LAST_RATE = 100, 0.03  # steps; share of the learning rate at the end
MEASURED, LEAST_BETWEEN_S = 10, 10.0  # times that held-out prompts are measured in a run, and how far apart
MOST_MEASURED = 0.03  # share of the time that they take: a big head's optimiser is long to write
SPARE = 1.5  # times the last measurement and save that is kept free for the next
MOST_BROKEN = 20  # training steps in a row whose gradients are not finite


@dataclass(frozen=True)
class Order:
    """What is asked for. Sizes of 0 mean what is usual."""

    method: str
    output: Path
    started: float  # time.monotonic() from which the time limit counts
    time_limit_s: float
    resume: bool = False
    most_tokens: int = 1024  # of a prompt and its answer
    max_steps: int = 0  # of this run; 0: as many as there is time for
    max_new_tokens: int = 256
    draft_vocab_size: int = 0
    block_size: int = 8
    begins_with: str | None = None  # directory of a head; None: of the target's layer
    learning_rate: float = 0.0
    seed: int = 0

    def longest_answer(self, prompt_tokens: int, max_len: int) -> int:
        """Tokens, at least 1: too few to learn from where a prompt leaves no room. `max_len`: the engine's."""
        return min(self.max_new_tokens, max(min(self.most_tokens, max_len) - prompt_tokens - 1, 1))

    @property
    def deadline(self) -> float:
        """time.monotonic()"""
        return self.started + self.time_limit_s

    @property
    def answers_end(self) -> float:
        """time.monotonic() until which a slow start may take answers."""
        return self.started + 2 * ANSWERS_SHARE * self.time_limit_s

    def too_short(self, what: str) -> ConfigError:
        """The time limit ends before anything is learnt."""
        spent = time.monotonic() - self.started
        text = f"{self.time_limit_s:g} s are too short for one round: {what} after {spent:.0f} s"
        return ConfigError("time_limit", f"{text}; give {2 * spent:.0f} s or more. --resume goes on with the answers")


class Shown(Protocol):
    """What a run tells while it goes on."""

    loading: Say

    def answered(self, done: int, total: int, num_tokens: int) -> None: ...

    def trained(self, report: "Report", left_s: float) -> None: ...


@dataclass
class Report:
    """How far a run is."""

    samples: int
    answer_tokens: int
    steps: int
    untrained: float
    loss: float = math.nan
    accept_length: float = math.nan
    steps_per_s: float = 0.0


Answered = tuple[list[Sample], list[Sample]]  # to learn from, and held out


class Run:
    """One call of `train-draft`."""

    def __init__(self, order: Order, settings: Settings, codec: Codec, prompts: PromptFile, shown: Shown) -> None:
        """Load the engine. Raises: ConfigError, CheckpointError."""
        self._order, self._shown, self._prompts, self._codec = order, shown, prompts, codec
        self._files, self._kind = settings.model.files, facts_of(order.method).draft_kinds[0]
        self._begun, self._numbers = dict[str, Any](), state.draft_numbers(self._files.config, self._files.weights)
        state.check_output(order.output, order.resume)
        self._random = torch.Generator().manual_seed(order.seed)
        self._loss: Tensor | None = None  # of a step that was not looked at yet
        self._num_broken = 0
        self._engine = LocalEngine(settings, self._ring_for, shown.loading)

    def _ring_for(self, target: LoadedTarget) -> FeatureRing:
        self._aux_layers = state.aux_layers_of(target.num_layers, self._kind, NUM_LAYERS)
        if path := self._order.begins_with:
            source = DraftSource.for_target(path, target)
            self._begun = read_head(source, target, "speculative_draft_model_path")
            self._aux_layers = self._begun["aux_layers"]
            self._numbers = state.draft_numbers(source.config(), source.origin)
        rows = BATCH_ROWS[target.embedding.device.type] // (2 if target.hidden_size > WIDE else 1)
        return FeatureRing(self._aux_layers, target.hidden_size, rows)

    def run(self) -> Report:
        """Answer and train until the time is over, and load what was written.

        Raises: ConfigError if there is nothing to learn, or no time; CheckpointError.
        """
        order = self._order
        try:
            self._samples, self._held_out = self._answered()
            kept = state.read_training(order.output) if order.resume else {}
            self._head = self._begun_head(kept)
            state.check_space(order.output, self._head)
            num_tokens = sum(len(sample.answer) for sample in self._samples)
            before = kept.get("steps", 0), kept.get("untrained", math.nan)
            self.report = Report(len(self._samples), num_tokens, *before)
            self._steps = BatchSteps(self._head, self._engine.ring.num_rows)
            if kept:
                self._steps.go_on(kept["optimiser"])
            self._train()
            spec = SpecSettings(order.method, str(order.output), num_steps=1, topk=1, width=2)
            method_named(spec.method).load(spec, self._engine.target, lambda done, total: None)  # as it is served
            return self.report
        finally:
            self._engine.close()

    def _answered(self) -> Answered:
        """Those of an earlier run, and more if not all prompts have been answered."""
        order, target, file = self._order, self._engine.target, self._prompts
        sizes = f"{target.num_layers} layers of {target.hidden_size}, {target.vocab_size} tokens"
        facts = {"method": order.method, "prompts": file.digest, "target": sizes, "begins_with": order.begins_with}
        num_asked, answered = state.read_answers(order.output, facts) if order.resume else (0, ([], []))
        if num_asked < len(file.lines):
            num_asked = self._ask(num_asked, answered)
            state.write_answers(order.output, facts | {"num_asked": num_asked}, *answered)
        if all(answered):
            return answered
        if time.monotonic() > order.answers_end:
            raise order.too_short("the first answers were not out")
        which = "held out" if answered[0] else "to learn from"
        text = f"no answer {which} has {LEAST_ANSWER} tokens before it repeats itself, of {num_asked}"
        raise ConfigError("prompts", f"{file.path}: {text}")

    def _ask(self, first: int, answered: Answered) -> int:
        """Answer prompts from this one on, those held out first. Returns the first that was not asked."""
        now, order, file, engine = time.monotonic(), self._order, self._prompts, self._engine
        until = min(now + ANSWERS_SHARE * (order.deadline - now), order.answers_end)
        found: dict[int, Sample] = {}
        num_tokens = 0
        for place, prompt, answer in engine.answers(self._asked(first), self._files.eos_token_ids, until):
            tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
            found[first + place] = Sample(tokens, len(prompt))
            num_tokens += len(answer)
            self._shown.answered(first + len(found), len(file.lines), num_tokens)
        for samples, are_held_out in zip(answered, (False, True), strict=True):
            new = [each for number, each in sorted(found.items()) if (number < file.num_held_out) is are_held_out]
            samples += of_samples.without_loop(new, engine.target.embedding.device)
        return max([first - 1, *found]) + 1

    def _asked(self, first: int) -> Iterator[Asked]:
        """Each prompt with its own seed; those held out, greedily."""
        for number, tokens in enumerate(self._prompts.encoded(self._codec, first), first):
            held_out = number < self._prompts.num_held_out
            temperature = 0.0 if held_out else TEMPERATURES[number % len(TEMPERATURES)]
            longest, seed = self._order.longest_answer(len(tokens), self._engine.max_len), self._order.seed + number
            yield tokens, SamplingParams(max_new_tokens=longest, temperature=temperature, seed=seed)

    def _begun_head(self, kept: dict[str, Any]) -> Head:
        """The head to begin with. `kept`: what an earlier run has left, if any; it goes on as that was."""
        order, target, samples = self._order, self._engine.target, self._samples
        longest = max(len(sample.tokens) for sample in (*samples, *self._held_out))
        frozen = Frozen(target, *self._numbers, longest + order.block_size + 64)
        begun = (kept or self._begun).get("tensors", order.seed)
        if self._kind is DraftKind.EAGLE_3:
            size = order.draft_vocab_size or max(8192, target.vocab_size // 4)
            always = self._files.eos_token_ids
            own = kept or self._begun or {"ids": of_samples.draft_vocabulary(samples, size, target.vocab_size, always)}
            return Eagle3(frozen, self._aux_layers, own["ids"], begun)
        own = kept or {"mask": of_samples.unused_token(samples, target.vocab_size), "block_size": order.block_size}
        of_kind = DSpark if self._kind is DraftKind.DSPARK else DFlash
        return of_kind(frozen, self._aux_layers, own["block_size"], own["mask"], begun)

    # --- steps, measurements and saves ----------------------------------------------------------------------

    def _train(self) -> None:
        """Train until the time limit leaves room for one more measurement and save alone."""
        order, report = self._order, self.report
        spent = self._measure()
        begun = measured = time.monotonic()
        if begun + SPARE * spent >= order.deadline:
            raise order.too_short("no training step was taken")
        seed = order.seed + report.steps  # a run that goes on sees another order
        batches = map(self._read, of_samples.endless_batches(self._samples, self._engine.ring.num_rows, Random(seed)))
        first, between = report.steps, max(order.time_limit_s / MEASURED, LEAST_BETWEEN_S)
        last = first + (order.max_steps or sys.maxsize)
        while report.steps < last and (report.steps == first or time.monotonic() + SPARE * spent < order.deadline):
            share = (time.monotonic() - begun) / max(order.deadline - SPARE * spent - begun, 1e-9)
            batch = next(batches)
            self._look()
            for _ in range(min(self._head.visits, last - report.steps)):
                self._step(batch, report.steps - first, share)
            report.steps_per_s = (report.steps - first) / (time.monotonic() - begun)
            if time.monotonic() - measured > max(between, spent / MOST_MEASURED):
                spent = max(self._measure() + self._save(), spent / SPARE)
                measured = time.monotonic()
            self._shown.trained(report, order.deadline - time.monotonic())
        self._measure()
        self._save()
        self._shown.trained(report, 0.0)

    def _step(self, batch: Batch, step: int, share: float) -> None:
        """`share`: of the time that has gone by."""
        rate = self._order.learning_rate or RATE * min(1.0, WIDE / 2 / self._engine.target.hidden_size)
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        self._steps.set_rate(rate * min(1.0, (step + 1) / WARM_UP) * fall)
        try:
            self._loss = self._steps.learn(batch, self._random)
        except torch.OutOfMemoryError as error:
            text = f"training has no memory left beside the engine; give it less: {str(error).splitlines()[0]}"
            raise ConfigError("mem_fraction_static", text) from None
        self.report.steps += 1

    def _look(self) -> None:
        """At the last step, whose end was waited for since: hidden states were written after it."""
        if self._loss is not None:
            loss, self._loss = float(self._loss), None
            self._num_broken = 0 if math.isfinite(loss) else self._num_broken + 1
            if self._num_broken == MOST_BROKEN:
                raise CheckpointError(f"{MOST_BROKEN} training steps in a row had gradients that are not finite")
            if math.isfinite(loss):
                self.report.loss = loss

    def _read(self, samples: Sequence[Sample]) -> Batch:
        """Let the engine write hidden states, and put a batch together."""
        length = of_samples.padded_length(samples)
        aux, hidden = self._engine.states([sample.tokens.tolist() for sample in samples], length)
        tokens = torch.stack([F.pad(sample.tokens.long(), (0, length - len(sample.tokens))) for sample in samples])
        numbers = [[len(sample.tokens) for sample in samples], [sample.start for sample in samples]]
        return Batch(tokens.to(aux.device), aux, hidden, *torch.tensor(numbers, device=aux.device))

    def _measure(self) -> float:
        """Of the held-out prompts, the accept length. Returns the seconds that it took."""
        self._look()
        begun, report, held_out = time.monotonic(), self.report, self._held_out
        batches = map(self._read, of_samples.batches_of(held_out, self._engine.ring.num_rows))
        rows = [row for batch in batches for row in self._head.accepted(batch).tolist()]
        starts, lengths = [sample.start for sample in held_out], [len(sample.tokens) for sample in held_out]
        report.accept_length = accept_length(rows, starts, lengths)
        if math.isnan(report.untrained):
            report.untrained = report.accept_length
        return time.monotonic() - begun

    def _save(self) -> float:
        """Write the draft, and what a run that goes on needs. Returns the seconds that it took."""
        begun, output, head, report = time.monotonic(), self._order.output, self._head, self.report
        state.write_draft(output, head.tensors | head.buffers, head.config())
        tensors = {name: tensor.detach().cpu() for name, tensor in head.tensors.items()}
        numbers = {"steps": report.steps, "untrained": report.untrained}
        state.write_training(output, head.kept | numbers | {"tensors": tensors, "optimiser": self._steps.state()})
        return time.monotonic() - begun
