"""Inputs of every test of this folder, and of `interpreted/`, are drawn from the same seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
