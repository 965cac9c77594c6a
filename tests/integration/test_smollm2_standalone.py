"""A small language model as draft, on real weights in float32: guesses and runs are those of standalone_reference.py.

What that loop did is committed (tests/data/standalone_chains.json). Needs `--heads DIR` with `standalone/`. The default
run takes 4 prompts x 32 tokens; `-m full` takes all 20 x 64.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.solo import Solo, assert_equal_up_to_near_ties
from test_smollm2 import ALL_TOKENS, DATA, FEW_TOKENS, accept_figures, chain_of, check_chain, greedy

from overlap_spec.config import ModelFiles
from overlap_spec.hub import check_draft_vocabulary

FEW_PROMPTS = 4


@pytest.fixture(scope="module")
def chains() -> dict[str, list[dict[str, Any]]]:
    return json.loads((DATA / "standalone_chains.json").read_text())["chains"]


def standalone(files: ModelFiles, heads: Path, num_steps: int, **more: Any) -> Solo:
    return chain_of(files, num_steps, "STANDALONE", speculative_draft_model_path=str(heads / "standalone"), **more)


def test_it_has_the_targets_tokens(files: ModelFiles, heads: Path) -> None:
    assert check_draft_vocabulary(str(heads / "standalone"), files) == []


@pytest.mark.parametrize("num_steps", [3, 4])
def test_guesses_and_runs_are_the_written_out_loops(
    files: ModelFiles, rows: list[dict], chains: dict, heads: Path, num_steps: int
) -> None:
    with closing(standalone(files, heads, num_steps)) as solo:
        lengths = check_chain(solo, rows[:FEW_PROMPTS], chains[str(num_steps)][:FEW_PROMPTS], FEW_TOKENS)
    assert set(lengths) == set(range(1, num_steps + 2))


def test_two_steps_in_flight_and_small_pages_change_nothing(files: ModelFiles, rows: list[dict], heads: Path) -> None:
    with closing(standalone(files, heads, 3, depth=2, page_size=1)) as solo:
        assert_equal_up_to_near_ties(rows[:2], lambda ids: solo.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_steps", [3, 4])
def test_accept_length_is_the_written_out_loops(
    files: ModelFiles, rows: list[dict], chains: dict, heads: Path, num_steps: int, record_summary
) -> None:
    with closing(standalone(files, heads, num_steps)) as solo:
        lengths = check_chain(solo, rows[:20], chains[str(num_steps)], ALL_TOKENS)
    record_summary(f"smollm2_standalone{num_steps}_cpu", accept_figures(lengths))
