"""EAGLE on real weights in float32: guesses and runs are those of tests/support/reference/eagle.py, step by step.

What that loop did is committed (tests/data/eagle_chains.json). Needs `--heads DIR` with `eagle2/` and
`token_map_16384.pt`, except where the engine only judges the loop's guesses. The default run takes 4 prompts x 32
tokens; `-m full` takes all 20 x 64.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.judged_steps import judged_runs, mean_length
from support.solo import Solo, assert_equal_up_to_near_ties
from test_smollm2 import ALL_TOKENS, DATA, FEW_TOKENS, accept_figures, chain_of, check_chain, greedy

from overlap_spec.config import ModelFiles

FEW_PROMPTS = 4
CHAINS = {"3": (3, False), "5": (5, False), "3 mapped": (3, True)}  # name in the file: draft steps, with a token map


@pytest.fixture(scope="module")
def chains() -> dict[str, list[dict[str, Any]]]:
    return json.loads((DATA / "eagle_chains.json").read_text())["chains"]


def eagle(files: ModelFiles, heads: Path, name: str, **more: Any) -> Solo:
    num_steps, mapped = CHAINS[name]
    return chain_of(
        files,
        num_steps,
        "EAGLE",
        speculative_draft_model_path=str(heads / "eagle2"),
        speculative_token_map=str(heads / "token_map_16384.pt") if mapped else None,
        **more,
    )


@pytest.mark.parametrize("name", CHAINS)
def test_guesses_and_runs_are_the_written_out_loops(
    files: ModelFiles, rows: list[dict], chains: dict, heads: Path, name: str
) -> None:
    with closing(eagle(files, heads, name)) as solo:
        lengths = check_chain(solo, rows[:FEW_PROMPTS], chains[name][:FEW_PROMPTS], FEW_TOKENS)
    assert len(set(lengths)) > 2


def test_two_steps_in_flight_and_small_pages_change_nothing(files: ModelFiles, rows: list[dict], heads: Path) -> None:
    with closing(eagle(files, heads, "3", depth=2, page_size=1)) as solo:
        assert_equal_up_to_near_ties(rows[:2], lambda ids: solo.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS)


def test_accept_lengths_of_the_written_out_loops_guesses(rows: list[dict], chains: dict) -> None:
    """Judged by the engine's op: what the head is worth on the 20 prompts; a third of the vocabulary costs below 2%."""
    references = [row["tokens"] for row in rows[:20]]
    worth = {name: mean_length(judged_runs(chains[name], references)) for name in CHAINS}
    assert worth["3"] >= 2.0
    assert worth["5"] > worth["3"]
    assert worth["3 mapped"] >= 0.98 * worth["3"]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CHAINS)
def test_accept_length_is_the_written_out_loops(
    files: ModelFiles, rows: list[dict], chains: dict, heads: Path, name: str, record_summary
) -> None:
    with closing(eagle(files, heads, name)) as solo:
        lengths = check_chain(solo, rows[:20], chains[name], ALL_TOKENS)
    record_summary(f"smollm2_eagle_chain{name.replace(' ', '_')}_cpu", accept_figures(lengths))
