"""A copy of an EAGLE-3 head that is trained on what the target computed, and the head that serves, in place.

    live      the head's own tensors, where captured graphs read them; they are written, never replaced
    copy      its parameters in float32, with gradients and two moments: what is trained (`train_draft`'s loss)
    before    what was live before the last take-over, in the head's own type

Nothing here waits for the device, but a capture: places of a loss come from tokens, which the host has, and gradients
that are not finite become 0 on the device. On CUDA steps and judgements are graphs (`train_draft/steps.py`).
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec.config import SpecSettings
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.features.adapt_draft import Watch
from overlap_spec.models.drafts.eagle3 import Eagle3Config, Eagle3Weights, tensor_places
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.linear import FEW_ROWS, DenseLinear, rows_of
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.train_draft import state
from overlap_spec.train_draft.eagle3 import STEPS, Eagle3, check_learns
from overlap_spec.train_draft.head import Batch, Frozen, Tensors
from overlap_spec.train_draft.steps import Replays, Steps

UPDATE = "update_weights_from_disk"
RATE = 1e-3
WIDE = 1024  # hidden sizes above it learn in smaller steps
WARM_UP = 20  # steps

log = logging.getLogger(__name__)


class LiveHead:
    """The tensors that serve, by the names of the checkpoint: written in place, where captured graphs read them."""

    def __init__(self, weights: Eagle3Weights) -> None:
        self._places = tensor_places(weights)

    def tensors(self) -> Tensors:
        """Views; of a weight in another layout than rows, copies."""
        return {name: rows_of(*place) for name, place in self._places.items()}

    @torch.inference_mode()
    def write(self, tensors: Tensors) -> None:
        """Write other values to the same addresses, rounded to the head's type. Sync: never on CUDA, of pinned ones."""
        for name, (part, rows) in self._places.items():
            whole = rows_of(part)
            whole[rows].copy_(tensors[name], non_blocking=True)
            if isinstance(part, DenseLinear) and part.stored.layout is not torch.strided:
                part.stored.copy_(torch.ops.mkldnn._reorder_linear_weight(whole, FEW_ROWS))


class HeadReader:
    """Reads heads from disk that can be written over the one that serves. `why_not`: there can be none."""

    def __init__(self, weights: Eagle3Weights | None, target: LoadedTarget, why_not: str = "") -> None:
        self.live = None if weights is None else LiveHead(weights)
        self._weights, self._target, self._why_not = weights, target, why_not
        self._ids = torch.empty(0) if weights is None else weights.target_ids.cpu()

    def read(self, path: str, load_format: str) -> Tensors:
        """A head's tensors on the host, pinned for a GPU. Raises: CheckpointError, ConfigError naming what differs."""
        if self._weights is None:
            raise ConfigError(UPDATE, self._why_not)
        source = DraftSource(path, self._weights.embedding.dtype, torch.device("cpu"), load_format)
        found = check_learns(load_eagle3(source, self._target), self._target, UPDATE)
        for name, (one, other) in differences(found.config, self._weights.config):
            raise CheckpointError(f"{source.origin}: {name}: found {one}, expected {other}, as of the head that serves")
        if not torch.equal(found.target_ids, self._ids):
            raise CheckpointError(f"{path}: d2t: the head guesses other tokens than the one that serves")
        on_gpu, tensors = self._target.embedding.device.type == "cuda", LiveHead(found).tensors()
        return {name: tensor.pin_memory() if on_gpu else tensor.clone() for name, tensor in tensors.items()}


def differences(found: Eagle3Config, expected: Eagle3Config) -> Iterator[tuple[str, tuple[object, object]]]:
    """Of two heads' configs, what a head's tensors are computed with: by name, found and expected."""
    for name in ("aux_layers", "target_hidden_size", "draft_vocab_size", "norm_output", "norm_residual"):
        if getattr(found, name) != getattr(expected, name):
            yield name, (getattr(found, name), getattr(expected, name))
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope"):
        if getattr(found.llama, name) != getattr(expected.llama, name):
            yield name, (getattr(found.llama, name), getattr(expected.llama, name))


class Sample(NamedTuple):
    """A segment's rows from `offset` on are those of `tokens`; the answer's are from `start` on."""

    tokens: Sequence[int] | Tensor  # on the host
    start: int
    offset: int

    @property
    def begin(self) -> int:
        """The first token whose hidden state before it is known: those of prompts' last layers are not kept."""
        return self.start + 1


@dataclass(frozen=True)
class Laid:
    """Samples side by side, on the host."""

    rows: Tensor  # [B, L] i64, of the ring
    batch: Batch  # its tokens, lengths and starts; hidden states are none
    places: Tensor  # [n] i64, of B * L: rows whose guess is learnt


def laid_out(samples: Sequence[tuple[int, Sample]], is_known: Tensor, length: int, size: int = 0) -> Laid:
    """Put samples together, each with the first row of its segment. Shapes: is_known [V] bool.

    `length`: L. `size`: B, if there are fewer samples: the last one fills it up, without places. Behind its end a
    sample's last row is repeated, because rows of others may hold NaN.
    """
    filled = [*samples, *[samples[-1]] * (size - len(samples))]
    tokens, rows = torch.zeros(len(filled), length, dtype=torch.int64), torch.empty(len(filled), length).long()
    for place, (first, sample) in enumerate(filled):
        count = len(sample.tokens)
        tokens[place, :count] = torch.as_tensor(sample.tokens)
        rows[place] = first + sample.offset + torch.arange(length).clamp(max=count - 2)
    none = torch.empty(0)
    lengths, begins = ([len(each.tokens) for _, each in filled], [each.begin for _, each in filled])
    batch = Batch(tokens, none, none, torch.tensor(lengths), torch.tensor(begins))
    wanted = batch.answered(ahead=2) & is_known[batch.ahead(2)]
    wanted[len(samples) :] = False
    return Laid(rows, batch, wanted.flatten().nonzero().squeeze(1))


class Packed(NamedTuple):
    """A batch in one tensor of integers, so that it is one copy to a device. Of equal shapes all have equal places."""

    values: Tensor  # [n] i64, on the host
    shape: tuple[int, int]  # B, L
    num_places: int

    @property
    def key(self) -> tuple[int, ...]:
        """Equal of those that are laid out alike."""
        return (*self.shape, self.num_places)

    @classmethod
    def of(cls, laid: Laid, num_places: int) -> "Packed":
        """With so many places: those that are too many repeat one whose states are known, and do not count."""
        batch, places = laid.batch, laid.places
        known = places[0] if len(places) else batch.starts[0] - 1
        filled = torch.cat((places, known.expand(num_places - len(places))))
        count = torch.tensor([len(places)])
        parts = laid.rows.view(-1), batch.tokens.view(-1), batch.lengths, batch.starts, filled, count
        return cls(torch.cat(parts), (laid.rows.shape[0], laid.rows.shape[1]), num_places)

    def read(self, values: Tensor, aux: Tensor, hidden: Tensor) -> "Learnt":
        """`values`, where a device has them, with the ring's states. Shapes: aux [R, n * H], hidden [R, H]."""
        (count, length), size = self.shape, self.shape[0] * self.shape[1]
        sizes = (size, size, count, count, self.num_places, 1)
        rows, tokens, lengths, starts, places, num_counted = values.split(sizes)
        of_aux, of_hidden = (states[rows].view(count, length, -1) for states in (aux, hidden))
        batch = Batch(tokens.view(count, length), of_aux, of_hidden, lengths, starts)
        return Learnt(batch, places, num_counted[0])


class Learnt(NamedTuple):
    """A batch on the device, and its rows whose guesses count: the first of `places`."""

    batch: Batch
    places: Tensor  # [n] i64
    num_counted: Tensor  # [] i64


class Judged(NamedTuple):
    """Guesses accepted after each root, and whether the copy's numbers, and what it computed of them, are finite."""

    live: Tensor  # [B, L] i64
    copy: Tensor  # [B, L] i64
    is_finite: Tensor  # [] bool


class Learner:
    """Trains the copy, judges it, and swaps weights. `num_guesses`: of a window, at most."""

    def __init__(self, weights: Eagle3Weights, target: LoadedTarget, num_positions: int, num_guesses: int) -> None:
        frozen = Frozen(target, weights.config.llama, {}, num_positions)
        self.live, self.reader = LiveHead(weights), HeadReader(weights, target)
        begun = {name: tensor.clone() for name, tensor in self.live.tensors().items()}
        self.copy = Eagle3(frozen, weights.config.aux_layers, weights.target_ids, begun=begun)
        self._before = begun
        self._most = min(num_guesses, STEPS)
        self._rate = RATE * min(1.0, (WIDE / target.hidden_size) ** 0.5)
        self._steps, self._replays = Steps(self.copy.tensors), Replays(target.embedding.device)
        self.num_steps = 0  # since the copy was begun
        self.is_known = torch.zeros(target.vocab_size, dtype=torch.bool)
        self.is_known[weights.target_ids.cpu()] = True

    def step(self, key: Hashable, read: Callable[[], Learnt]) -> None:
        """Take one step on what is read. Batches of one key have equal shapes and addresses. Sync: never on CUDA."""
        self.num_steps += 1
        self._steps.set_rate(self._rate * min(1.0, self.num_steps / WARM_UP))
        self._replays.run(("step", key), lambda: self._steps.take(lambda: self.copy.loss_at(*read())))

    def judge(self, key: Hashable, read: Callable[[], Learnt]) -> Judged:
        """The live head and the copy on what is read; of one key, where the last one was. Sync: never on CUDA."""
        return self._replays.run(("judge", key), lambda: self._judged(read()))

    @torch.no_grad()
    def _judged(self, learnt: Learnt) -> Judged:
        live, batch = copy.copy(self.copy), learnt.batch
        live.tensors = self.live.tensors()
        dtype = batch.aux.dtype
        finite = [tensor.to(dtype).isfinite().all() for tensor in self.copy.tensors.values()]
        finite.append(self.copy.loss_at(*learnt).isfinite())
        of_live, of_copy = (head.accepted(batch).clamp(max=self._most) for head in (live, self.copy))
        return Judged(of_live, of_copy, torch.stack(finite).all())

    def take_over(self) -> None:
        """The copy's numbers serve; those before are kept."""
        self.keep()
        self.live.write(self.copy.tensors)

    @torch.no_grad()
    def keep(self) -> None:
        """What serves is what `go_back` leads to."""
        for name, tensor in self.live.tensors().items():
            self._before[name].copy_(tensor)

    def go_back(self) -> None:
        """What served before the last take-over serves again."""
        self.live.write(self._before)
        self.start_again()

    @torch.no_grad()
    def start_again(self) -> None:
        """The copy becomes what serves, with nothing learnt."""
        for name, tensor in self.live.tensors().items():
            self.copy.tensors[name].copy_(tensor)
        for moments in self._steps.state()["state"].values():
            for tensor in moments.values():
                tensor.zero_()  # where graphs read it
        self.num_steps = 0


class Saver:
    """`--adapt-save`: writes heads that have taken over, in a thread, as a checkpoint that can be served.

    Owner of the directory, which holds the newest one. `spec`: of the draft, whose config.json is that of what it has
    become. What cannot be written is a line in the log, and the head serves all the same.
    """

    def __init__(self, output: Path, spec: SpecSettings, target: LoadedTarget) -> None:
        """Raises: ConfigError naming the flag if there can be no such directory."""
        self._output, self._config = output, dict[str, Any]()
        if spec.draft_path is not None:
            self._config = dict(DraftSource.for_target(spec.draft_path, target).config())
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("adapt_save", f"{output}: {error.strerror or error}") from None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self.watch = Watch(time.thread_time)  # of what the thread takes from others

    def save(self, learner: Learner) -> None:
        """Begin to write what serves now. One that is still being written is not waited for: this one is left out."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("--adapt-save: the version before is still being written to %s: this one is not", self._output)
            return
        self._copied.clear()
        self._thread = threading.Thread(target=self._write, args=(learner,), daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Until the weights may change: a copy of them is in the host's memory."""
        self._copied.wait()

    def finish(self) -> None:
        """Until the newest one is written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, learner: Learner) -> None:
        with self.watch:
            self._write_whole(learner)

    def _write_whole(self, learner: Learner) -> None:
        try:
            try:
                tensors = {name: tensor.cpu().clone() for name, tensor in learner.live.tensors().items()}
            finally:
                self._copied.set()
            state.write_draft(self._output, tensors | learner.copy.buffers, self._config)
            log.info("--adapt-save: %s has the head that serves now; it can remember what it has read", self._output)
        except ConfigError as error:
            log.warning("--adapt-save: %s", error)


def training_bytes(weights: Eagle3Weights, rows: int, segment_rows: int) -> int:
    """What the copy takes of a device's memory, and a step on so many rows.

    For each parameter 16 bytes, one copy in the head's type, and two more while a step runs; of each row in each
    unrolled step what its gradient needs: activations, and in float32 probabilities of keys. Of one step the logits and
    the target's distribution, and of each the gradient of the head's rows.
    """
    llama, size = weights.config.llama, weights.embedding.dtype.itemsize
    count = weights.num_bytes // size
    row = (12 * llama.hidden_size + 5 * llama.intermediate_size) * size
    if size > 2:
        row += llama.num_heads * (segment_rows + STEPS) * (2 * 4 + 2 * size)
    of_logits = len(weights.target_ids) * (4 * 4 + 2 * size)
    of_heads = len(weights.target_ids) * (weights.config.target_hidden_size + STEPS * llama.hidden_size) * size
    return count * (16 + 3 * size) + rows * (STEPS * row + of_logits) + of_heads


def batches(chosen: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """So many at a time."""
    for begin in range(0, len(chosen), size):
        yield chosen[begin : begin + size]
