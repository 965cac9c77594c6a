"""Which rows of prompts leave the device, so that their log-probs are returned."""

from array import array

import pytest
from msgspec.structs import replace
from support.fake_device import make_admit

from overlap_spec.features.log_probs.scheduler import PromptLogProbs
from overlap_spec.messages import LogProbParams, Resumed
from overlap_spec.scheduler.prefix_cache import Node, Share
from overlap_spec.scheduler.requests import Request

PROMPT = [1, 2, 3, 4, 5, 6]


def admitted(asked: LogProbParams | None, resumed: Resumed | None = None) -> Request:
    admit = replace(make_admit(1, PROMPT, 4, log_probs=asked), resumed=resumed)
    request = Request(admit, Node(None, b"", [], Share("", 0.0)))
    assert not PromptLogProbs().admitted(request), "it waits for nothing"
    return request


@pytest.mark.parametrize(("first", "rows"), [(0, (0, 5)), (2, (2, 5)), (4, (4, 5)), (5, (0, 0)), (9, (0, 0))])
def test_rows_from_the_first_one_asked_for_to_the_last_but_one_leave_the_device(first: int, rows: tuple[int, int]):
    request = admitted(LogProbParams(top=2, prompt_from=first))
    assert request.rows_out(0, len(PROMPT)) == rows and request.out_bytes == 3 * 16
    assert request.cacheable_len == (first if rows[1] else len(PROMPT)), "rows that the cache has are not computed"
    assert request.before_out == (first if rows[1] else float("inf"))


@pytest.mark.parametrize("asked", [None, LogProbParams(top=1)])
def test_without_log_probs_of_the_prompt_none_of_its_rows_does(asked: LogProbParams | None):
    assert admitted(asked).rows_out(0, len(PROMPT)) == (0, 0)


def test_a_request_that_goes_on_has_returned_those_of_its_prompt():
    resumed = Resumed(array("i", [7, 8]).tobytes(), 0, 0)
    request = admitted(LogProbParams(prompt_from=0), resumed)
    assert request.rows_out(0, len(PROMPT)) == (0, 0) and request.cacheable_len == len(PROMPT) + 2
