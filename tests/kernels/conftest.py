"""Inputs of every test of this folder, and of `interpreted/`, are drawn from the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from support.gluon_interpreter.launch import Hopper


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """A Hopper GPU of 4 multiprocessors, whose Gluon kernels run on the CPU."""
    pytest.importorskip("triton", reason="Gluon is part of Triton, whose wheels are for Linux: pip install triton")
    from support.gluon_interpreter.launch import hopper_gpu

    return hopper_gpu(monkeypatch, num_multiprocessors=4)
