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
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from overlap_spec.config import Settings, facts_of
from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.drafts.dflash import load_dflash
from overlap_spec.models.drafts.dspark import load_dspark
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.train_draft import state
from overlap_spec.train_draft.answers import Asked, FeatureRing, LocalEngine, Say
from overlap_spec.train_draft.dflash import NUM_LAYERS, DFlash, DSpark
from overlap_spec.train_draft.eagle3 import Eagle3, LiveHead, check_learns
from overlap_spec.train_draft.head import Batch, Frozen, Head, accept_length
from overlap_spec.train_draft.prompts import PromptFile
from overlap_spec.train_draft.samples import (
    LEAST_ANSWER,
    Sample,
    batches_of,
    draft_vocabulary,
    endless_batches,
    padded_length,
    unused_token,
    without_loop,
)
from overlap_spec.train_draft.state import aux_layers_of, draft_config, layer_numbers
from overlap_spec.train_draft.steps import BatchSteps, Steps

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
    begins_with: str = ""  # directory of a head; "": of the target's layer
    learning_rate: float = 0.0
    seed: int = 0

    def longest_answer(self, prompt_tokens: int, max_len: int) -> int:
        """Tokens, at least 1: too few to learn from where a prompt leaves no room. `max_len`: the engine's."""
        return min(self.max_new_tokens, max(min(self.most_tokens, max_len) - prompt_tokens - 1, 1))

    @property
    def kind(self) -> DraftKind:
        """The draft that the method guesses with."""
        return facts_of(self.method).draft_kinds[0]

    @property
    def deadline(self) -> float:
        """time.monotonic()"""
        return self.started + self.time_limit_s


class Shown(Protocol):
    """What a run tells while it goes on."""

    loading: Say

    def answered(self, done: int, total: int, num_tokens: int) -> None: ...

    def trained(self, report: "Report", left_s: float) -> None: ...


@dataclass
class Report:
    """How far a run is."""

    method: str
    samples: int
    answer_tokens: int
    steps: int = 0
    loss: float = math.nan
    untrained: float = math.nan
    accept_length: float = math.nan
    steps_per_s: float = 0.0
    rows: int = 0  # of samples, padding included, that this run has learnt from
    rows_per_s: float = 0.0


@dataclass
class _Answered:
    samples: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)
    num_asked: int = 0  # of the file's prompts


class Run:
    """One call of `train-draft`."""

    def __init__(self, order: Order, settings: Settings, codec: Codec, prompts: PromptFile, shown: Shown) -> None:
        """Load the engine. Raises: ConfigError, CheckpointError."""
        self._order, self._shown, self._prompts, self._codec = order, shown, prompts, codec
        if settings.ranks > 1:
            raise ConfigError("tp_size", f"train-draft runs on one device, got {settings.ranks}; use 1")
        self._files = settings.model.files
        self._llama = layer_numbers(self._files.config, self._files.weights)
        self._num_layers = min(NUM_LAYERS, int(self._files.config.get("num_hidden_layers") or 1))
        state.check_output(order.output, order.resume)
        self._device = settings.model.device
        self._engine = LocalEngine(settings, self._ring_for, shown.loading)
        self._target = self._engine.target

    def _ring_for(self, target: LoadedTarget) -> FeatureRing:
        self._aux_layers = aux_layers_of(target.num_layers, self._order.kind, self._num_layers)
        self._begun: Eagle3Weights | None = None
        if path := self._order.begins_with:
            loaded = load_eagle3(DraftSource.for_target(path, target), target)
            self._begun = check_learns(loaded, target, "speculative_draft_model_path")
            self._aux_layers, self._llama = self._begun.config.aux_layers, self._begun.config.llama
        rows = BATCH_ROWS[self._device] // (2 if target.hidden_size > WIDE else 1)
        return FeatureRing(self._aux_layers, target.hidden_size, rows)

    def run(self) -> Report:
        """Answer and train until the time is over. Raises: ConfigError if there is nothing to learn, or no time."""
        try:
            answered = self._answer()
            head, kept = self._head(answered)
            state.check_space(self._order.output, state.bytes_of(head))
            training = _Training(self._order, self._engine, head, answered, kept, self._shown)
            report = training.until_deadline()
            self._check_loads()
            return report
        finally:
            self._engine.close()

    def _facts(self) -> dict[str, Any]:
        """What a run that goes on may not change."""
        target = self._target
        sizes = f"{target.num_layers} layers of {target.hidden_size}, {target.vocab_size} tokens"
        facts = {"method": self._order.method, "prompts": self._prompts.digest, "target": sizes}
        return facts | {"begins_with": self._order.begins_with or None}

    def _answer(self) -> _Answered:
        answered = _Answered()
        if self._order.resume:
            facts, answered.samples, answered.held_out = state.read_answers(self._order.output)
            answered.num_asked = facts.pop("num_asked")
            state.check_facts(self._order.output, facts, self._facts())
        if answered.num_asked < len(self._prompts.lines):
            self._ask(answered)
            facts = self._facts() | {"num_asked": answered.num_asked}
            state.write_answers(self._order.output, facts, answered.samples, answered.held_out)
        if not answered.samples or not answered.held_out:
            if time.monotonic() > self._answers_end:
                raise self._too_short("the first answers were not out")
            which = "samples" if not answered.samples else "held-out prompts"
            raise ConfigError(
                "prompts",
                f"{self._prompts.path}: no answer to learn from among the {which}: {answered.num_asked} prompts were"
                f" answered, and without loops no answer has {LEAST_ANSWER} tokens",
            )
        return answered

    @property
    def _answers_end(self) -> float:
        order = self._order
        return order.started + (order.deadline - order.started) * 2 * ANSWERS_SHARE

    def _ask(self, answered: _Answered) -> None:
        """Answer prompts that have no answer yet, those held out first."""
        now, first = time.monotonic(), answered.num_asked
        until = min(now + ANSWERS_SHARE * (self._order.deadline - now), self._answers_end)
        prompts: dict[int, list[int]] = {}
        found: dict[int, list[int]] = {}
        num_tokens = 0
        asked = self._asked(first, prompts)
        for place, answer in self._engine.answers(asked, self._files.eos_token_ids, until):
            found[first + place] = answer
            num_tokens += len(answer)
            self._shown.answered(first + len(found), len(self._prompts.lines), num_tokens)
        answered.num_asked = max(first, *found) + 1 if found else first
        device = self._target.embedding.device
        for place, samples in ((False, answered.samples), (True, answered.held_out)):
            new = [
                Sample(torch.tensor([*prompts[number], *answer], dtype=torch.int32), len(prompts[number]))
                for number, answer in sorted(found.items())
                if (number < self._prompts.num_held_out) is place
            ]
            samples += without_loop(new, device)

    def _asked(self, first: int, prompts: dict[int, list[int]]) -> Iterator[Asked]:
        """Each prompt with its own seed; those held out, greedily."""
        for number, tokens in enumerate(self._prompts.encoded(self._codec, first), first):
            prompts[number] = tokens
            held_out = number < self._prompts.num_held_out
            temperature = 0.0 if held_out else TEMPERATURES[number % len(TEMPERATURES)]
            longest, seed = self._order.longest_answer(len(tokens), self._engine.max_len), self._order.seed + number
            yield Asked(tokens, SamplingParams(max_new_tokens=longest, temperature=temperature, seed=seed))

    def _head(self, answered: _Answered) -> tuple[Head, dict[str, Any] | None]:
        """The head to begin with, or the one that an earlier run has left."""
        order, target = self._order, self._target
        kept = state.read_training(order.output) if order.resume else None
        config = draft_config(self._files.config)
        longest = max(len(sample.tokens) for sample in (*answered.samples, *answered.held_out))
        frozen = Frozen.of(target, self._llama, config, longest + order.block_size + 64)
        head: Head
        if self._begun is not None:
            begun = LiveHead(self._begun).tensors()
            head = Eagle3(frozen, self._aux_layers, self._begun.target_ids, order.seed, begun)
        elif order.kind is DraftKind.EAGLE_3:
            size = order.draft_vocab_size or max(8192, target.vocab_size // 4)
            ids = draft_vocabulary(answered.samples, size, target.vocab_size, self._files.eos_token_ids)
            head = Eagle3(frozen, self._aux_layers, ids if kept is None else kept["ids"], order.seed)
        else:
            mask = unused_token(answered.samples, target.vocab_size) if kept is None else kept["mask"]
            block = order.block_size if kept is None else kept["block_size"]
            of_kind = DSpark if order.kind is DraftKind.DSPARK else DFlash
            head = of_kind(frozen, self._aux_layers, self._num_layers, block, mask, order.seed)
        return head, kept

    def _check_loads(self) -> None:
        """Load what was written, as the engine does. Raises: CheckpointError."""
        source = DraftSource.for_target(str(self._order.output), self._target)
        if self._order.kind is DraftKind.EAGLE_3:
            load_eagle3(source, self._target)
        else:
            (load_dspark if self._order.kind is DraftKind.DSPARK else load_dflash)(source, self._target, 2)

    def _too_short(self, what: str) -> ConfigError:
        spent = time.monotonic() - self._order.started
        return too_short(self._order, what, spent)


def too_short(order: Order, what: str, spent: float) -> ConfigError:
    """A time limit that ends before anything is learnt."""
    return ConfigError(
        "time_limit",
        f"{order.time_limit_s:g} s are too short for one round: {what} after {spent:.0f} s; give {2 * spent:.0f} s or"
        " more. The answers are kept: --resume goes on",
    )


class _Training:
    """Steps, measurements and saves."""

    def __init__(
        self,
        order: Order,
        engine: LocalEngine,
        head: Head,
        answered: _Answered,
        kept: dict[str, Any] | None,
        shown: Shown,
    ) -> None:
        self._order, self._engine, self._head, self._shown = order, engine, head, shown
        self._samples, self._held_out = answered.samples, answered.held_out
        tokens = sum(len(sample.answer) for sample in self._samples)
        self.report = Report(order.method, len(self._samples), tokens)
        hidden = engine.target.hidden_size
        self._rate = order.learning_rate or RATE * min(1.0, WIDE / 2 / hidden)
        self._steps = Steps(head.tensors)
        self._random = torch.Generator().manual_seed(order.seed)
        self._batches: Iterator[list[Sample]] = iter(())
        self._loss: Tensor | None = None  # of a step that was not looked at yet
        self._num_broken = 0
        device = engine.target.embedding.device
        self._taken = BatchSteps(head, self._steps, engine.ring.part_rows, device)
        if kept is not None:
            self._go_on(kept)

    def _go_on(self, kept: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self._head.tensors.items():
                tensor.copy_(kept["tensors"][name])
        self._steps.go_on(kept["optimiser"])
        self.report.steps, self.report.untrained = kept["steps"], kept["untrained"]

    def until_deadline(self) -> Report:
        """Train until the time limit leaves room for one more measurement and save alone."""
        spent = self._measure_and_save(saves=False)
        order, report = self._order, self.report
        begun = time.monotonic()
        if begun + SPARE * spent >= order.deadline:
            raise too_short(order, "no training step was taken", begun - order.started)
        seed = order.seed + report.steps  # a run that goes on sees another order
        self._batches = endless_batches(self._samples, self._engine.ring.part_rows, Random(seed))
        first, between = report.steps, max(order.time_limit_s / MEASURED, LEAST_BETWEEN_S)
        following, measured, most = self._next_batch(), begun, order.max_steps or sys.maxsize
        while (now := time.monotonic()) + SPARE * spent < order.deadline or report.steps == first:
            if (left := most - (report.steps - first)) <= 0:
                break
            batch, following = following, self._next_batch()
            share = (now - begun) / max(order.deadline - SPARE * spent - begun, 1e-9)
            self._look()
            for _ in range(min(self._head.visits, left)):
                self._step(batch, report.steps - first, share)
            report.rows += batch.tokens.numel()
            spent_s = time.monotonic() - begun
            report.steps_per_s, report.rows_per_s = (report.steps - first) / spent_s, report.rows / spent_s
            if time.monotonic() - measured > max(between, spent / MOST_MEASURED):
                spent = max(self._measure_and_save(), spent / SPARE)
                measured = time.monotonic()
            self._shown.trained(report, order.deadline - time.monotonic())
        self._measure_and_save()
        self._shown.trained(report, 0.0)
        return report

    def _step(self, batch: Batch, step: int, share: float) -> None:
        """`share`: of the time that has gone by."""
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        self._steps.set_rate(self._rate * min(1.0, (step + 1) / WARM_UP) * fall)
        try:
            self._loss = self._taken.take(batch, self._random)
        except torch.OutOfMemoryError as error:
            text = f"training has no memory left beside the engine; give it less: {str(error).splitlines()[0]}"
            raise ConfigError("mem_fraction_static", text) from None
        self.report.steps += 1

    def _look(self) -> None:
        """At the last step, whose end was waited for since: hidden states were written after it."""
        if self._loss is None:
            return
        loss, self._loss = float(self._loss), None
        self._num_broken = 0 if math.isfinite(loss) else self._num_broken + 1
        if self._num_broken == MOST_BROKEN:
            raise CheckpointError(f"{MOST_BROKEN} training steps in a row had gradients that are not finite")
        if math.isfinite(loss):
            self.report.loss = loss

    def _next_batch(self) -> Batch:
        return self._read(next(self._batches))

    def _read(self, samples: Sequence[Sample]) -> Batch:
        """Let the engine write hidden states, and put a batch together."""
        length = padded_length(samples)
        aux, hidden = self._engine.states([sample.tokens.tolist() for sample in samples], length)
        tokens = torch.zeros(len(samples), length, dtype=torch.int64)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
        numbers = [[len(sample.tokens) for sample in samples], [sample.start for sample in samples]]
        lengths, starts = torch.tensor(numbers, device=aux.device)
        return Batch(tokens.to(aux.device), aux, hidden, lengths, starts)

    def _measure_and_save(self, saves: bool = True) -> float:
        """Returns the seconds that it took."""
        self._look()
        begun = time.monotonic()
        rows: list[list[int]] = []
        for samples in batches_of(self._held_out, self._engine.ring.part_rows):
            rows += self._head.accepted(self._read(samples)).tolist()
        starts = [sample.start for sample in self._held_out]
        self.report.accept_length = accept_length(rows, starts, [len(sample.tokens) for sample in self._held_out])
        if math.isnan(self.report.untrained):
            self.report.untrained = self.report.accept_length
        if saves:
            self._save()
        return time.monotonic() - begun

    def _save(self) -> None:
        head, report = self._head, self.report
        state.write_draft(self._order.output, head)
        kept: dict[str, Any] = {
            "tensors": {name: tensor.detach().cpu() for name, tensor in head.tensors.items()},
            "optimiser": self._steps.state(),
            "steps": report.steps,
            "untrained": report.untrained,
        }
        state.write_training(self._order.output, kept | head.kept)
