"""The committed summary of attacks: by server and case, what the victim noticed and what the attacker got."""

from pathlib import Path
from typing import Any

import torch

from overlap_spec.bench.report import describe_run
from support.attacks.case import Case
from support.summaries import Summaries, update


def note(path: Path, case: Case, server: str, figures: dict[str, Any]) -> None:
    """Add what a case came to."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    row = {"rule": case.rule, "finding": case.finding, **figures}

    def add(summaries: Summaries) -> None:
        attacks = summaries.setdefault("attacks", {"cases": {}})
        attacks["run"] = describe_run(device, torch.get_num_threads(), ("tests",))
        attacks["cases"].setdefault(case.name, {})[server] = row

    update(path, add)
