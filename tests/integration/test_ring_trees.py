"""Trees under random schedules: whatever their shape and proposer, answers are those of plain decoding."""

from typing import Any

import pytest
from support.random_schedules import run_schedules, run_seeds
from support.tiny.methods import COPIED

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import StepCosts

WINDOWED: dict[str, Any] = {"family": "mistral with a window", "num_draft_tokens": 14, "num_steps": 5}
# Of one request and of six: who is alone has wide steps, in company they are narrow.
COSTS = StepCosts((1, 6), (1, 2, 4, 8), ((1.0, 1.02, 1.04, 1.06), (1.0, 3.0, 5.0, 7.0)))
ADAPTIVE: dict[str, Any] = {"num_draft_tokens": 8, "num_steps": 4, "widths_seed": None, "step_costs": COSTS}
FUSED: dict[str, Any] = {"topk": 1, "num_steps": 3, "num_draft_tokens": 3 + 1 + COPIED}
CASES: dict[str, dict[str, Any]] = {
    "EAGLE3": {},
    "EAGLE3, wide": {"method": "EAGLE3", "topk": 8, "num_draft_tokens": 24, "num_steps": 4},
    "EAGLE3, keys of a window": {"method": "EAGLE3", **WINDOWED},
    "EAGLE": {},
    "EAGLE with a token map": {},
    "NEXTN": {},
    "NEXTN in DeepSeek's layout": {},
    "STANDALONE": {},
    "STANDALONE of fewer tokens": {},
    "DFLASH": {},
    "DFLASH, wide": {"method": "DFLASH", "topk": 8, "num_draft_tokens": 24, "num_steps": 4},
    "DFLASH, as wide as pays": {"method": "DFLASH", **ADAPTIVE},
    "P-EAGLE": {},
    "P-EAGLE, wide": {"method": "P-EAGLE", "topk": 8, "num_draft_tokens": 24, "num_steps": 4},
    "P-EAGLE, as wide as pays": {"method": "P-EAGLE", **ADAPTIVE},
    "EAGLE3 beside n-grams": FUSED,
    "P-EAGLE beside n-grams": FUSED,
    "DSPARK beside n-grams": FUSED,
    "random trees": {},
    "EAGLE3, as wide as pays": {"method": "EAGLE3", **ADAPTIVE},
}


def engine_of(name: str) -> dict[str, Any]:
    return {"method": name, "topk": 3, **CASES[name]}


def schedules_of(name: str, num_schedules: int, codec: TextCodec) -> dict[str, int]:
    return dict(run_schedules(num_schedules, codec, **engine_of(name)))


@pytest.mark.full_but_every(20)
@pytest.mark.slow_but_every(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_a_schedule(codec: TextCodec, name: str) -> None:
    """Too few requests for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(6, 7), codec, engine_of(name))
    assert seen["finished"] > 3 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_few_random_schedules(codec: TextCodec, name: str) -> None:
    schedules_of(name, 25 if "EAGLE3," in name else 12, codec)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_400_random_schedules(codec: TextCodec, name: str, record_summary) -> None:
    record_summary(
        f"schedules_400_trees_{name.replace(' ', '_')}", {"schedules": 400, **schedules_of(name, 400, codec)}
    )
