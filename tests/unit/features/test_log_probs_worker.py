"""Which slots have log-probs in the worker: those whose requests ask, from the step that they take their slots in.

The host's part of log-probs: each request gets the pairs that it has asked for, of its rows alone.
"""

import math
from array import array

import pytest
import torch

from overlap_spec.features.log_probs.worker import LogProbBlock, LogProbOutput, LogProbSteps, ScoredStep
from overlap_spec.messages import MAX_LISTED_LOG_PROBS, ChunkWork, LogProbParams, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.devices import CpuDevice, CpuDownload
from overlap_spec.worker.prefill import Chunks

LISTED = LogProbParams(top=1, token_ids=(5, 6))


def steps() -> tuple[LogProbSteps, LogProbOutput]:
    output = LogProbOutput(4, 10, torch.device("cpu"))
    return LogProbSteps(output, CpuDevice()), output


def takes(steps: LogProbSteps, **asked: LogProbParams | None) -> None:
    """Requests take slots, which are named s0, s1, .."""
    resets = {int(slot[1:]): ResetSlot(SamplingParams(log_probs=each), 1, (), 1) for slot, each in asked.items()}
    steps.changed(StepPlan(1, 1, resets=resets))


def test_a_step_packs_for_slots_that_ask_and_for_no_others() -> None:
    hook, output = steps()
    assert output.packer([0, 1], []) is None
    takes(hook, s1=LISTED, s2=None)
    assert output.packer([0, 2], []) is None
    packer = output.packer([0, 1, 2], [0, 3, 0])
    assert packer is not None and packer.asked == [None, LISTED, None] and packer.prompt_counts == [0, 3, 0]
    assert output.listed[1, :2].tolist() == [5, 6] and output.listed[2, 0] == -1


def test_the_next_request_of_a_slot_asks_for_itself_and_a_step_in_flight_keeps_what_it_was_asked_for() -> None:
    hook, output = steps()
    takes(hook, s1=LISTED)
    in_flight = output.packer([1], [])
    takes(hook, s1=None)
    assert output.packer([1], []) is None
    assert in_flight is not None and in_flight.asked == [LISTED]


def test_a_request_is_of_the_kind_with_outputs_if_it_asks() -> None:
    _, output = steps()
    assert output.asked(SamplingParams(log_probs=LISTED)) and not output.asked(SamplingParams())


TOP = 20


def block(num_rows: int, top: int = TOP) -> torch.Tensor:
    """Rows of `log_prob_rows`: pair j of row i is (i + j / 100, j)."""
    pairs = 1 + top + MAX_LISTED_LOG_PROBS
    values = torch.arange(num_rows, dtype=torch.float64)[:, None] + torch.arange(pairs) / 100
    ids = torch.arange(pairs, dtype=torch.float64).expand(num_rows, pairs)
    return torch.stack((values, ids), 2).flatten(1).contiguous()


def records(tensor: torch.Tensor, first: int, count: int, asked: LogProbParams) -> list[list[tuple[float, int]]]:
    """The pairs of each row."""
    (data,) = CpuDownload(torch.zeros(1, dtype=torch.int64), (tensor,)).blocks()
    numbers = array("d", LogProbBlock(data, len(tensor)).records(first, count, asked))
    assert len(numbers) == 2 * count * asked.width
    pairs = [(numbers[at], int(numbers[at + 1])) for at in range(0, len(numbers), 2)]
    return [pairs[at : at + asked.width] for at in range(0, len(pairs), asked.width)]


@pytest.mark.parametrize("top", [0, 1, 5, TOP])
@pytest.mark.parametrize("num_listed", [0, 1, MAX_LISTED_LOG_PROBS])
def test_a_request_gets_the_pairs_that_it_asks_for(top: int, num_listed: int) -> None:
    asked = LogProbParams(top=top, token_ids=tuple(range(num_listed)))
    columns = [*range(1 + top), *range(1 + TOP, 1 + TOP + num_listed)]
    found = records(block(5), 2, 3, asked)
    assert found == [[(pytest.approx(row + column / 100), column) for column in columns] for row in (2, 3, 4)]


def test_a_vocabulary_with_fewer_tokens_than_are_asked_for_has_no_pairs_in_their_places() -> None:
    (row,) = records(block(1, top=3), 0, 1, LogProbParams(top=5, token_ids=(7,)))
    assert [token for _, token in row] == [0, 1, 2, 3, -1, -1, 4]
    assert [math.isnan(log_prob) for log_prob, _ in row] == [False] * 4 + [True] * 2 + [False]


def test_rows_of_prompts_are_divided_among_their_requests() -> None:
    asked = [LogProbParams(top=1, prompt_from=0), None, LogProbParams(prompt_from=2)]
    chunks = [ChunkWork(0, 0, b"", rows_out=(0, 2)), ChunkWork(1, 0, b""), ChunkWork(2, 0, b"", rows_out=(2, 5))]
    (data,) = CpuDownload(torch.zeros(1, dtype=torch.int64), (block(5),)).blocks()
    columns = ScoredStep(asked, Chunks(chunks).counts_out()).pack([[], [], []], 1, None, data)
    assert columns is not None and columns.tokens == []
    assert [array("d", each)[::2].tolist() for each in columns.prompts] == [
        pytest.approx([0, 0.01, 1, 1.01]),
        [],
        pytest.approx([2, 3, 4]),
    ]
