"""What is said of tests of others: each that does not pass is counted, with a reason or as failed."""

from clients.results_of import pytest_summary
from documents.lists import not_passed, outcome

LOG = """\
PASSED tests/api/chat/test_completions.py::TestChats::test_create[loose]
FAILED tests/api/chat/test_completions.py::TestChats::test_method_retrieve[loose] - openai.NotFoundError: no
FAILED tests/api/test_completions.py::TestCompletions::test_create - AssertionError
SKIPPED [1] tests/api/test_models.py:12: no client
3 failed in 5 s
"""


def test_every_test_is_counted_and_has_a_reason_or_failed() -> None:
    result = {"client": "openai_sdist", **pytest_summary(LOG)}
    assert outcome(result) == "1 of 4 tests; 1 are explained below, 2 are not"
    stored, failed, skipped = not_passed([result])
    assert stored.startswith("- `openai_sdist`, 1: nothing is stored")
    assert failed == "- `openai_sdist`, `api/test_completions.py::TestCompletions::test_create` fails: AssertionError"
    assert skipped == "- `openai_sdist`, `api/test_models.py:12` fails: no client"


def test_checks_and_requests_that_fail_are_told() -> None:
    checked = {"client": "openai", "checks": {"models": "ok", "chats": "AssertionError: 3"}}
    assert outcome(checked) == "1 of 2 checks"
    assert not_passed([checked]) == ["- `openai`, `chats` fails: AssertionError: 3"]
    assert outcome({"client": "aiperf", "succeeded": 5, "failed": 1}) == "5 of 6 requests"
