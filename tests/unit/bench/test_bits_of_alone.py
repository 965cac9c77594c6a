"""What benchmarks/bits_of_alone.py asks of which engines, and what it calls a difference."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import bits_of_alone as script
import msgspec
import pytest
from bits_of_alone import ALONE, PARTS, asked, config_of, differs, steps_of, write_models_of
from documents.result_tables import RENDERERS

from overlap_spec.client.calls import Completion
from overlap_spec.client.log_probs import Candidate, TokenLogProb
from overlap_spec.config import Machine
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.messages import Finish, FinishKind, Usage

GPU = Machine(8, has_cuda=True)


@pytest.mark.parametrize("name", [name for name in PARTS if name != "tiny"])
def test_engines_keep_the_contract_on_a_gpu_and_the_one_alone_has_one_slot(tmp_path: Path, name: str) -> None:
    part = PARTS[name]
    write_models_of(name, tmp_path)
    for own in (ALONE, *part.ways.values()):
        config = msgspec.structs.replace(config_of(part, name, own, tmp_path), load_format="dummy")  # no file is read
        settings = resolve(config, resolve_model(config), GPU)[0]
        assert settings.model.deterministic and settings.attention.target_in_order
        assert settings.spec.topk <= 1 and settings.recovery.enabled
        assert settings.scheduler.max_running_requests > 1 or settings.spec.method == "NONE"


def test_all_kinds_of_requests_come_and_each_is_always_the_same() -> None:
    requests = [asked("smollm2", number) for number in range(200)]
    assert requests == [asked("smollm2", number) for number in range(200)]
    samplings = [each.sampling for each in requests]
    assert any(each.leaves_after for each in requests) and any(each.greedy for each in samplings)
    assert {each.grammar.kind for each in samplings if each.grammar} == {"json_schema", "regex", "ebnf"}
    assert any(each.allows_some for each in samplings) and any(each.repetition_penalty != 1 for each in samplings)
    assert any(each.log_probs and each.log_probs.prompt_from == 0 for each in samplings)
    assert {steps_of("smollm2", number).num_steps for number in range(200)} == {None, 0, 1, 2}
    assert max(len(each.prompt) for each in requests) + 64 < PARTS["smollm2"].context
    assert not any(asked("fp8", number).sampling.grammar for number in range(50))


def answer(log_prob: float = -1.25, top: float = -0.5, **changed: Any) -> Completion:
    tokens = [TokenLogProb(7, log_prob, b"", [Candidate(9, top, b"")], []) for _ in range(3)]
    finish, usage = Finish(FinishKind.LENGTH), Usage(1, 3, 0, 0)
    given: dict[str, Any] = {"token_ids": [7, 7, 7], "log_probs": tokens, "prompt_log_probs": tokens[:1], **changed}
    return Completion("", finish=finish, usage=usage, **given)


def test_the_last_bit_of_a_log_prob_is_a_difference() -> None:
    assert differs(answer(), answer(), whole=True) == ""
    next_number = math.nextafter(-1.25, 0)
    assert "prompt log-probs of 0" in differs(answer(next_number), answer(), whole=True)
    assert differs(answer(top=math.nextafter(-0.5, 0), prompt_log_probs=[]), answer(prompt_log_probs=[]), whole=True)
    assert "token 2: 8, alone 7" in differs(answer(token_ids=[7, 7, 8]), answer(), whole=True)
    assert "1 prompt log-probs, alone 0" in differs(answer(), answer(prompt_log_probs=[]), whole=True)


def test_an_answer_whose_client_left_is_the_beginning() -> None:
    begun = answer(token_ids=[7], log_probs=answer().log_probs[:1])
    assert differs(begun, answer(), whole=False) == ""
    assert "1 tokens" in differs(begun, answer(), whole=True)
    assert differs(replace(begun, log_probs=[]), answer(), whole=False)


def test_a_run_goes_on_behind_the_last_number_of_each_way(tmp_path: Path) -> None:
    output = str(tmp_path / "report.json")
    first = script.Run("fp8", 0.0, output)
    first.row["ways"]["NGRAM"]["requests"] = 40
    first._write()
    script.Run("int4", 0.0, output)._write()
    assert {way: row["requests"] for way, row in script.Run("fp8", 0.0, output).row["ways"].items()} == {
        "EAGLE3": 0,
        "NGRAM": 40,
    }
    assert script.Run("kv8", 0.0, output).row["of"] == 240


def test_bursts_cover_the_requests_of_a_part_in_each_round_and_there_are_enough() -> None:
    for name, part in PARTS.items():
        numbers = [number for first in range(0, part.answers, part.burst) for number in script.numbers_of(name, first)]
        rounds = [numbers[begin : begin + part.requests] for begin in range(0, part.answers, part.requests)]
        assert all(sorted(each) == list(range(part.requests)) for each in rounds)
        assert len({tuple(each) for each in rounds}) == part.rounds
    answers = {name: part.answers * len(part.ways) for name, part in PARTS.items()}
    assert answers.pop("smollm2") >= 2000 and answers.pop("tiny") and answers.pop("recurring")
    assert set(answers.values()) == {240}


def test_the_table_has_what_was_compared_and_what_differs() -> None:
    row = {"requests": 40, "tokens": 1900, "kills": 1, "open_at_a_kill": 12, "preempted_total": 3, "differ": 2}
    head, _, line = RENDERERS["bits_of_alone"]({"parts": {"kv8": {"ways": {"NGRAM": row}}}})
    assert line == "| 8B, 8-bit KV | NGRAM | 40 | 1900 | 0 | 3 | 0 | 0 | 1 | 12 | 2 |"
    assert head.count("|") == line.count("|") and head.endswith("differ |")
