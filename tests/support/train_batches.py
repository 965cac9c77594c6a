"""Tiny heads that are trained, and batches that are drawn."""

import torch

from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.train_draft.dflash import DFlash
from overlap_spec.train_draft.eagle3 import Eagle3
from overlap_spec.train_draft.head import Batch, Frozen, Head
from support.tiny.models import load_tiny_target, tiny_target

TARGET = tiny_target(3, layers=4)
AUX = (0, 2)


def frozen(device: str) -> Frozen:
    """The target's parts; on a GPU in float32."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    llama = LlamaConfig.from_hf(TARGET.config | {"tie_word_embeddings": False}, "tiny")
    return Frozen(load_tiny_target(TARGET, dtype, torch.device(device)), llama, {}, 64)


def head(device: str = "cpu") -> Eagle3:
    """Of half the vocabulary."""
    return Eagle3(frozen(device), AUX, torch.arange(TARGET.config["vocab_size"])[::2])


def block_head(kind: type[DFlash], device: str = "cpu") -> DFlash:
    """Two layers, and blocks of five rows; a bias that is not 0."""
    made = kind(frozen(device), AUX, 5, 2)
    if (bias := made.tensors.get("markov_head.markov_w2.weight")) is not None:
        with torch.no_grad():
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return made


def loss_of(head: Head, given: Batch, seed: int = 0) -> torch.Tensor:
    """Of all that the head would draw from the batch."""
    places = head.places(given, torch.Generator().manual_seed(seed))
    return head.loss_at(given, places, torch.tensor(len(places)))


def batch(seed: int, count: int, length: int, device: str = "cpu") -> Batch:
    """Samples of different lengths, whose answers begin at token 3."""
    random_, size = torch.Generator().manual_seed(seed), TARGET.config["hidden_size"]
    tokens = torch.randint(3, 128, (count, length), generator=random_)
    states = (torch.randn(count, length, n * size, generator=random_) for n in (len(AUX), 1))
    aux, hidden = (each.to(device, torch.float64 if device == "cpu" else torch.float32) for each in states)
    lengths = torch.tensor([length - n for n in range(count)], device=device)
    return Batch(tokens.to(device), aux, hidden, lengths, torch.full((count,), 3, device=device))
