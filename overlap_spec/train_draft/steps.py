"""Steps of training: a loss, its gradients and their bound, AdamW; and work that a GPU does again and again.

A step launches about a thousand small kernels, which takes the host longer than the device. So on CUDA what comes again
with inputs of the same shapes at the same addresses is captured and replayed (`Replays`).
"""

import logging
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from overlap_spec_kernels import NotMadeError, only_compiles
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from overlap_spec.train_draft.head import Batch, Head, Tensors
from overlap_spec.worker.capture import CudaRecorder, Replay, no_collection

BETAS, DECAY, CLIP = (0.9, 0.95), 0.01, 1.0
SHARES = 8  # numbers of places that are told apart, as shares of a batch's rows
NOT_CAPTURED = "This instance was constructed with capturable"  # a warning of steps before a capture

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Replays:
    """Launches work of each key, on CUDA operation by operation once, and then as a graph.

    The first time loads kernels, allocates what stays, and counts like any other. All graphs share a pool of memory,
    as they run one after another on one stream. What cannot be captured stays as it is. Sync: never.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorder = CudaRecorder() if device.type == "cuda" else None
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[Replay, Any]] = {}

    def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """Do it. What it returns is written anew by the next work of this key, and of no other."""
        if self._recorder is None or only_compiles():  # of what is compiled ahead, no kernel is launched
            return work()
        if key not in self._met:
            self._met.add(key)
            return work()
        if key not in self._graphs:
            try:
                with no_collection():
                    self._graphs[key] = self._recorder.record("training", work)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotMadeError) as error:
                log.warning("Training goes on operation by operation: no CUDA graph of it: %s", error)
                self._recorder = None
                return work()
        replay, result = self._graphs[key]
        replay()
        return result  # type: ignore[no-any-return]  # of this key's work


class Steps:
    """Owner of the optimiser of a head's parameters, `tensors`. Norms' weights do not decay. Sync: never."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = list(tensors.values())
        # A graph reads the rate where it was when it was captured.
        self._rate = torch.zeros((), device=self._tensors[0].device)
        groups = [
            {"params": [each for each in self._tensors if each.dim() > 1], "weight_decay": DECAY},
            {"params": [each for each in self._tensors if each.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=self._rate, betas=BETAS, fused=True, capturable=True)

    def set_rate(self, rate: float) -> None:
        """Of the steps from now on."""
        self._rate.fill_(rate)

    def take(self, loss: Callable[[], Tensor]) -> Tensor:
        """Take one step. Returns the loss; NaN if gradients were not finite: then only older ones move parameters."""
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_CAPTURED)
            found = loss()
            found.backward()
            is_finite = bound(self._tensors)
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)
            return torch.where(is_finite, found.detach(), math.nan)

    def state(self) -> dict[str, Any]:
        """Moments and counts, which graphs write."""
        return {"state": self._optimiser.state_dict()["state"]}

    def go_on(self, state: dict[str, Any]) -> None:
        """With what `state` gave, before any step. Rates are set again."""
        self._optimiser.load_state_dict(self._optimiser.state_dict() | state)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate


class BatchSteps(Steps):
    """Steps on batches of at most `num_rows` rows. They are copied to where graphs read them, and filled up.

    So there is one shape for each length of a batch's samples and each of `SHARES` numbers of places.
    """

    def __init__(self, head: Head, num_rows: int) -> None:
        super().__init__(head.tensors)
        self._head, self._num_rows, self._share = head, num_rows, -(-num_rows // SHARES)
        self._replays, self._kept = Replays(self._rate.device), dict[str, Tensor]()

    def learn(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Take one step. Returns its loss, which the next step writes anew. Sync: a head may read what is known."""
        count, length = batch.tokens.shape
        samples = max(self._num_rows // length, count)
        kept = [self._copied(each.name, getattr(batch, each.name), samples) for each in fields(Batch)]
        for each in kept[3:]:
            each[count:] = 0  # samples of no tokens
        places = self._head.places(Batch(*kept), random)
        num_places = max(-(-len(places) // self._share), 1) * self._share
        at = self._copied("places", places, num_places)
        at[len(places) :] = at[0] if len(places) else 0
        number = self._copied("number", torch.tensor([len(places)]), 1)[0]
        key = samples, length, num_places
        return self._replays.run(key, lambda: self.take(lambda: self._head.loss_at(Batch(*kept), at, number)))

    def _copied(self, name: str, values: Tensor, count: int) -> Tensor:
        """Where tensors of this name are, with `count` for the first dimension."""
        shape = (count, *values.shape[1:])
        if name not in self._kept:
            room = self._share * SHARES * math.prod(values.shape[2:])
            self._kept[name] = torch.zeros(room, dtype=values.dtype, device=self._rate.device)
        kept: Tensor = self._kept[name][: math.prod(shape)].view(shape)
        kept[: len(values)].copy_(values)
        return kept


def bound(tensors: Sequence[Tensor]) -> Tensor:
    """Bound the norm of gradients; if it is not finite, they become 0. Returns whether it is, [] bool. Sync: never."""
    is_finite = clip_grad_norm_(tensors, CLIP, foreach=False).isfinite()
    for gradient in [tensor.grad for tensor in tensors if tensor.grad is not None]:
        gradient.masked_fill_(~is_finite, 0.0)
    return is_finite
