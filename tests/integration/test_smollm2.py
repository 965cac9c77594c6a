"""Real weights in float32: plain decoding is transformers', and EAGLE-3 is the written-out loop's, step by step.

References are committed (tests/data, with the scripts that made them). The slow tests take 2 prompts x 24
tokens; `-m full` takes everything.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.solo import Solo, assert_equal_up_to_near_ties

from overlap_spec.config import ModelFiles
from overlap_spec.messages import SamplingParams

DATA = Path(__file__).parent.parent / "data"
FEW_PROMPTS, FEW_TOKENS, ALL_TOKENS = 2, 24, 64


@pytest.fixture(scope="module")
def chains() -> dict[str, list[dict[str, Any]]]:
    return json.loads((DATA / "eagle3_chains.json").read_text())["chains"]


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> Iterator[Solo]:
    solo = Solo(files, device="cpu", speculative_algorithm="NONE")
    yield solo
    solo.close()


@pytest.fixture(scope="module")
def eagle3(files: ModelFiles) -> Iterator[Solo]:
    solo = chain_of(files, 3)
    yield solo
    solo.close()


def chain_of(files: ModelFiles, num_steps: int, method: str = "EAGLE3", **more: Any) -> Solo:
    return Solo(
        files,
        device="cpu",
        speculative_algorithm=method,
        speculative_num_steps=num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=num_steps + 1,
        **more,
    )


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0, seed=0)


def check_chain(solo: Solo, rows: list[dict], chains: list[dict], num_tokens: int) -> list[int]:
    """Same first token, same guesses, same accept_len at every step. Returns the lengths of all runs."""
    lengths = []
    for row, chain in zip(rows, chains, strict=True):
        answer = solo.answer(row["prompt_ids"], greedy(num_tokens))
        steps = chain["steps"][: len(answer.runs)]
        assert answer.tokens[0] == chain["first"]
        assert answer.guesses == [step["guesses"] for step in steps]
        assert answer.runs == [step["committed"] for step in steps]
        assert [len(run) - 1 for run in answer.runs] == [step["accept_len"] for step in steps]
        lengths += [len(run) for run in answer.runs]
    return lengths


def accept_figures(lengths: list[int]) -> dict[str, float]:
    """Of all runs."""
    return {"accept_length": round(sum(lengths) / len(lengths), 4), "verify_steps": len(lengths)}


@pytest.mark.slow
def test_plain_decoding_is_transformers(plain: Solo, rows: list[dict]) -> None:
    assert_equal_up_to_near_ties(
        rows[:FEW_PROMPTS], lambda ids: plain.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS
    )


@pytest.mark.slow
def test_eagle3_drafts_and_accepts_as_the_written_out_loop(eagle3: Solo, rows: list[dict], chains: dict) -> None:
    lengths = check_chain(eagle3, rows[:FEW_PROMPTS], chains["3"][:FEW_PROMPTS], FEW_TOKENS)
    assert set(lengths) == {1, 2, 3, 4}


@pytest.mark.full
def test_two_steps_in_flight_and_small_pages_change_nothing(files: ModelFiles, rows: list[dict]) -> None:
    with closing(chain_of(files, 3, depth=2, page_size=1)) as solo:
        assert_equal_up_to_near_ties(rows[:3], lambda ids: solo.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS)


@pytest.mark.full  # test_ring_random_schedules.py draws with and without guesses
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(plain: Solo, eagle3: Solo, rows: list[dict]) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=12345)
    for row in rows[:2]:
        expected = plain.answer(row["prompt_ids"], sampling).tokens
        assert eagle3.answer(row["prompt_ids"], sampling).tokens == expected
        assert plain.answer(row["prompt_ids"], sampling).tokens == expected


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_plain_decoding_is_transformers_on_all_prompts(plain: Solo, rows: list[dict], record_summary) -> None:
    found = assert_equal_up_to_near_ties(rows, lambda ids: plain.answer(ids, greedy(ALL_TOKENS)).tokens, ALL_TOKENS)
    record_summary("smollm2_plain_cpu", {"prompts": len(rows), "tokens": ALL_TOKENS, "near_ties": str(found)})


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_steps", [3, 5])
def test_accept_length_is_the_written_out_loops(
    files: ModelFiles, rows: list[dict], chains: dict, num_steps: int, record_summary
) -> None:
    with closing(chain_of(files, num_steps)) as solo:
        lengths = check_chain(solo, rows[:20], chains[str(num_steps)], ALL_TOKENS)
    record_summary(f"smollm2_chain{num_steps}_cpu", accept_figures(lengths))


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_steps", [1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_eagle3_is_plain_decoding(
    files: ModelFiles, rows: list[dict], num_steps: int, depth: int, page_size: int, record_summary
) -> None:
    with closing(chain_of(files, num_steps, depth=depth, page_size=page_size)) as solo:
        found = assert_equal_up_to_near_ties(rows, lambda ids: solo.answer(ids, greedy(ALL_TOKENS)).tokens, ALL_TOKENS)
    name = f"smollm2_eagle3_cpu_steps{num_steps}_depth{depth}_page{page_size}"
    record_summary(name, {"prompts": len(rows), "tokens": ALL_TOKENS, "near_ties": str(found)})
