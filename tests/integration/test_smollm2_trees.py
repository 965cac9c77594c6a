"""Trees on real weights in float32: trees and runs are those of tests/support/reference/trees.py, step by step.

What that loop did is committed (tests/data/trees.json). The head that ships needs nothing; the others `--heads DIR`.
The default run takes 3 prompts x 24 tokens; `-m full` takes all 20 x 64.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.judged_steps import judged_runs, mean_length
from support.reference.trees import path_of
from support.solo import Solo, SoloAnswer, assert_equal_up_to_near_ties
from test_smollm2 import ALL_TOKENS, DATA, greedy

from overlap_spec.config import ModelFiles
from overlap_spec.messages import SamplingParams

FEW_PROMPTS, FEW_TOKENS = 3, 24
METHODS = {"eagle3": "EAGLE3", "eagle2": "EAGLE", "mtp": "NEXTN", "standalone": "STANDALONE"}
SWAPPED = 1 / 40  # of trees: nodes of nearly the same worth in another order


@pytest.fixture(scope="module")
def trees() -> dict[str, Any]:
    return json.loads((DATA / "trees.json").read_text())


Open = Callable[..., Solo]


@pytest.fixture
def open_tree(request: pytest.FixtureRequest, files: ModelFiles, trees: dict) -> Iterator[Open]:
    """Opens an engine by the name of its head; closed at the end."""
    opened: list[Solo] = []

    def open_one(name: str, **more: Any) -> Solo:
        target, path = files, None
        if name == "mtp":
            target = request.getfixturevalue("merged")
        elif name != "eagle3":
            path = str(request.getfixturevalue("heads") / name)
        num_steps, topk, width = trees["shape"]
        opened.append(
            Solo(
                target,
                device="cpu",
                speculative_algorithm=METHODS[name],
                speculative_draft_model_path=path,
                speculative_num_steps=num_steps,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=width,
                **more,
            )
        )
        return opened[-1]

    yield open_one
    for solo in opened:
        solo.close()


def as_steps(answer: SoloAnswer) -> list[dict[str, Any]]:
    """In the form of the file."""
    steps = zip(answer.guesses, answer.parents, answer.runs, strict=True)
    return [
        {"guesses": guesses, "parents": parents, "path": path_of(guesses, parents, run), "committed": run}
        for guesses, parents, run in steps
    ]


def check_trees(solo: Solo, rows: list[dict], expected: list[dict], num_tokens: int) -> list[int]:
    """Same first token, runs, and trees; of these a few may have near-ties. Returns the lengths of all runs."""
    lengths, swapped = [], 0
    for row, tree in zip(rows, expected, strict=True):
        answer = solo.answer(row["prompt_ids"], greedy(num_tokens))
        steps = as_steps(answer)
        assert answer.tokens[0] == tree["first"]
        assert answer.runs == [step["committed"] for step in tree["steps"][: len(steps)]]
        swapped += sum(step != other for step, other in zip(steps, tree["steps"], strict=False))
        lengths += [len(run) for run in answer.runs]
    assert swapped <= max(1, SWAPPED * len(lengths)), f"{swapped} of {len(lengths)} trees are others"
    return lengths


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", METHODS)
def test_trees_and_runs_are_the_written_out_loops(open_tree: Open, rows: list[dict], trees: dict, name: str) -> None:
    lengths = check_trees(open_tree(name), rows[:FEW_PROMPTS], trees["trees"][name][:FEW_PROMPTS], FEW_TOKENS)
    assert len(set(lengths)) > 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_steps_in_flight_and_small_pages_change_nothing(open_tree: Open, rows: list[dict]) -> None:
    solo = open_tree("eagle3", depth=2, page_size=1)
    assert_equal_up_to_near_ties(rows[:2], lambda ids: solo.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_seed_gives_the_same_tokens_with_and_without_trees(
    open_tree: Open, files: ModelFiles, rows: list[dict]
) -> None:
    sampling = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.95, seed=12345)
    plain = Solo(files, device="cpu", speculative_algorithm="NONE")
    try:
        expected = plain.answer(rows[1]["prompt_ids"], sampling).tokens
    finally:
        plain.close()
    assert open_tree("eagle3").answer(rows[1]["prompt_ids"], sampling).tokens == expected


@pytest.mark.parametrize(
    ("name", "file", "chain"),
    [
        ("eagle3", "eagle3_chains.json", "3"),
        ("eagle2", "eagle_chains.json", "3"),
        ("mtp", "mtp_chains.json", "3"),
        ("standalone", "standalone_chains.json", "3"),
    ],
)
def test_a_tree_accepts_more_than_a_chain(rows: list[dict], trees: dict, name: str, file: str, chain: str) -> None:
    """On the 20 prompts, judged by the engine's ops: one level more and two more children a node."""
    chains = json.loads((DATA / file).read_text())["chains"]
    references = [row["tokens"] for row in rows[:20]]
    of_trees, of_chains = (judged_runs(steps, references) for steps in (trees["trees"][name], chains[chain]))
    assert mean_length(of_trees) > 1.1 * mean_length(of_chains)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", METHODS)
def test_accept_length_is_the_written_out_loops(
    open_tree: Open, rows: list[dict], trees: dict, name: str, record_summary
) -> None:
    expected = trees["trees"][name]
    lengths = check_trees(open_tree(name), rows[: len(expected)], expected, ALL_TOKENS)
    figures = {"accept_length": round(sum(lengths) / len(lengths), 4), "verify_steps": len(lengths)}
    record_summary(f"smollm2_{name}_tree_{'_'.join(map(str, trees['shape']))}_cpu", figures)
