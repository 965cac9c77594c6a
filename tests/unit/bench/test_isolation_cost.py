"""The figures of isolation's cost, and their table."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from documents.result_tables import RENDERERS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("isolation_cost", ROOT / "benchmarks/isolation_cost.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shares_are_of_whole_prompts_and_rates_of_answers(script: ModuleType) -> None:
    asked = [script.Asked(*each) for each in ((0.5, 0, 1000), (1.5, 1000, 1000), (1.0, 600, 600), (1.0, 0, 600))]
    found = script.figure("two names", asked)
    assert found == {"clients": "two names", "cached": 0.5, "tokens_per_second": float(script.ANSWER)}


def test_the_table_has_a_row_of_each_way() -> None:
    rows = [{"clients": "no keys", "cached": 0.742, "tokens_per_second": 143.3}]
    *_, row = RENDERERS["isolation_cost"]({"figures": rows})
    assert row == "| no keys | 74% | 143 |"
