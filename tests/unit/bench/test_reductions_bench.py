"""The benchmark of reductions: what it makes of the ranks' times, and what it says where GPUs are missing."""

import sys

import pytest
import reductions
import torch


def test_the_slowest_rank_counts() -> None:
    ranks = [[{"rows": 1, "nccl_us": 9.0, "one_shot_us": 3.0}], [{"rows": 1, "nccl_us": 8.0, "one_shot_us": 4.0}]]
    assert reductions.slowest(ranks) == [{"rows": 1, "nccl_us": 9.0, "one_shot_us": 4.0}]


def test_too_few_gpus_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reductions.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert reductions.main() == 2
    assert "between 2 GPUs: this machine has 1" in capsys.readouterr().err
