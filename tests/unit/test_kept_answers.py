"""Answers of plain decoding that tests keep for each other."""

from pathlib import Path

import pytest
from support.kept_answers import KeptAnswers, from_another_start


def test_an_answer_is_made_once_in_all_processes(tmp_path: Path) -> None:
    made: list[str] = []

    def answer() -> list[str]:
        made.append("answer")
        return list(made)

    first, second, alone = KeptAnswers(tmp_path), KeptAnswers(tmp_path), KeptAnswers()
    assert [kept.get(("a", 1), answer) for kept in (first, first, second)] == [["answer"]] * 3
    assert first.get(("a", 2), answer) == ["answer"] * 2, "of another question"
    assert alone.get(("a", 1), answer) == ["answer"] * 3, "nothing is shared without a directory"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 / 0)
    assert kept.get("a", lambda: 1.0) == 1.0


def test_others_begin_elsewhere() -> None:
    starts = {tuple(from_another_start(range(15), name)) for name in ("EAGLE", "NEXTN", "NGRAM", "STANDALONE")}
    assert len(starts) > 1 and all(sorted(order) == list(range(15)) for order in starts)
    assert from_another_start([], "EAGLE") == []
