"""The committed summary of attacks: by server and case, what the victim noticed and what the attacker got."""

from pathlib import Path
from typing import Any

import torch

from support.attacks.case import Case
from support.summaries import Summaries, describe, update

COMMAND = "python -m pytest -m attack tests/attacks --summaries FILE"


def note(path: Path, case: Case, server: str, figures: dict[str, Any]) -> None:
    """Add what a case came to."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    run = describe(device, torch.get_num_threads()) | {"command": COMMAND}
    row = {"rule": case.rule, "finding": case.finding, "commit": run["commit"], **figures}

    def add(summaries: Summaries) -> None:
        attacks = summaries.setdefault("attacks", {"cases": {}})
        attacks["run"] = run
        attacks["cases"].setdefault(case.name, {})[server] = row

    update(path, add)
