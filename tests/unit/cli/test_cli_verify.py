"""`overlap-spec verify` without an engine: what a line may be, the exit status and the report of every outcome."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace as changed
from support.audit_reports import NOTHING_AUDITED

from overlap_spec.client import Client
from overlap_spec.client.calls import Completion
from overlap_spec.entrypoints.cli import main
from overlap_spec.entrypoints.cli.verify import (
    AT_ONCE,
    SHIPPED,
    BadLine,
    Verified,
    VerifyPrompt,
    _records,
    print_verified,
    read_prompt_file,
    report_of,
    run_audited,
)
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import (
    AuditFigures,
    AuditReport,
    Difference,
    Finish,
    FinishKind,
    SamplingParams,
    TextPrompt,
    Usage,
)

PROMPT = VerifyPrompt("p.jsonl, line 4", "text", TextPrompt("Hi"), SamplingParams(), {"sampling_seed": 1, "top_k": 5})
ANSWER = Completion("abc", [1, 2, 3], Finish(FinishKind.LENGTH), Usage(1, 0, 3, 1))
NO_TOKENS = Completion("", [], Finish(FinishKind.STOP), Usage(1, 0, 0, 0))
ENGINE = {"model": "tiny", "method": "EAGLE3 (3, 1, 4)", "dtype": "float64", "device": "cpu"}
ALL_RIGHT = changed(NOTHING_AUDITED, rate=1.0, figures=AuditFigures(requests=1, tokens=3))


def difference(is_fault: bool) -> Difference:
    return Difference(
        request_id="0",
        position=2,
        step_id=9,
        served=2,
        drawn=5,
        margin=1.5,
        control_margin=1.25,
        bound=0.1,
        is_fault=is_fault,
    )


def found(is_fault: bool) -> AuditReport:
    figures = AuditFigures(requests=1, tokens=3, near_ties=1 - is_fault, faults=int(is_fault), bound=0.1)
    return changed(ALL_RIGHT, figures=figures, recent=[difference(is_fault)], near_ties_per_10k=3333.33)


def verified(audit: AuditReport, *answers: Completion) -> Verified:
    answers = answers or (ANSWER,)
    return Verified([PROMPT] * len(answers), answers, audit, ENGINE, {2: " a", 5: " b"})


def dropped(count: int) -> AuditReport:
    return changed(ALL_RIGHT, dropped_because={"the backlog is full": count})


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        (verified(ALL_RIGHT), 0, "Every token is plain decoding's.\n"),
        (verified(found(is_fault=False)), 0, "Every token is plain decoding's, near-ties aside.\n"),
        (verified(found(is_fault=True)), 1, "FAULTS: 1 tokens are not plain decoding's\n"),
        (verified(ALL_RIGHT, ANSWER, NO_TOKENS), 0, "Every token is plain decoding's.\n"),
        (verified(dropped(1), ANSWER, ANSWER), 1, "NOT VERIFIED: 1 prompts were not audited, 3 tokens were\n"),
        (verified(NOTHING_AUDITED, NO_TOKENS), 1, "NOT VERIFIED: 0 prompts were not audited, 0 tokens were\n"),
    ],
)
def test_the_verdict(outcome: Verified, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome.status == report_of(outcome)["status"] == status
    print_verified(outcome)
    assert capsys.readouterr().out.endswith("\n" + said)


def test_a_fault_is_shown_with_all_that_runs_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"faults": [{"request_id": "0"}], "prompt_ids": [4, 5], "sampling": {"seed": 77}}
    outcome = replace(verified(found(is_fault=True)), records=[record])
    line = {"input_ids": [4, 5], "sampling_params": {"top_k": 5, "seed": 77}}
    assert report_of(outcome)["faults"] == [{"run_again": line, **record}]
    print_verified(outcome)
    output = capsys.readouterr().out
    assert line in [json.loads(text) for text in output.splitlines() if text.startswith("{")]
    row = next(text for text in output.splitlines() if "FAULT " in text)
    assert all(word in row for word in (PROMPT.where, " 2 ", " 9 ", "2 ' a'", "5 ' b'", "1.5", "1.25"))


class ScriptedClient:
    """Answers at once; each report of the audit has 150 requests less in its backlog."""

    def __init__(self, why_off: str = "", refusal: RequestError | None = None) -> None:
        self.why_off, self.refusal = why_off, refusal
        self.backlog, self.most_waiting, self.num_answers = 0, 0, 0

    async def complete(self, prompt: object, sampling: object, request_id: str) -> Completion:
        if self.refusal is not None:
            raise self.refusal
        assert request_id == str(self.num_answers)
        self.num_answers += 1
        self.backlog += 1
        self.most_waiting = max(self.most_waiting, self.backlog)
        return ANSWER

    async def audit(self) -> AuditReport:
        self.backlog = max(0, self.backlog - 150)
        return changed(ALL_RIGHT, why_off=self.why_off, figures=AuditFigures(backlog=self.backlog))


def audited(client: ScriptedClient, prompts: Sequence[VerifyPrompt]) -> tuple[list[Completion], AuditReport]:
    return asyncio.run(run_audited(cast(Client, client), list(prompts)))


def test_audits_are_waited_for_and_few_wait_at_once() -> None:
    client = ScriptedClient()
    answers, report = audited(client, [PROMPT] * 2 * AT_ONCE)
    assert len(answers) == 2 * AT_ONCE and report.figures.backlog == client.backlog == 0
    assert client.most_waiting == AT_ONCE, "more could overflow the audit's backlog"


def test_an_engine_without_audits_verifies_nothing() -> None:
    with pytest.raises(OverlapSpecError, match="nothing can be verified: of a lossy verifier"):
        audited(ScriptedClient(why_off="of a lossy verifier"), [PROMPT])


def test_what_the_engine_refuses_names_line_and_field() -> None:
    with pytest.raises(BadLine, match="^p.jsonl, line 4: text has 9 tokens: too long$"):
        audited(ScriptedClient(refusal=RequestError("prompt", "prompt has 9 tokens: too long")), [PROMPT])


def test_the_prompts_that_ship_are_ten() -> None:
    prompts = read_prompt_file(SHIPPED)
    assert len(prompts) == 10 and {prompt.kind for prompt in prompts} == {"text", "messages"}
    assert {prompt.sampling.greedy for prompt in prompts} == {True, False}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object: "),
        ("[1]", "not a JSON object: "),
        ('{"text": "\udc80"}', "not a JSON object: "),
        ({}, "text: give one of text, messages, input_ids, got none"),
        ({"text": "a", "input_ids": [1]}, "text: give one of text, messages, input_ids, got text and input_ids"),
        ({"text": 3}, "text: expected `str | null`, got `int`"),
        ({"input_ids": [-1]}, "input_ids: not a list of token ids: "),
        ({"input_ids": []}, "input_ids: a prompt must have at least one token"),
        ({"messages": []}, "messages: at least one message is needed"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: missing"),
        ({"text": "a", "temperature": 1}, "temperature: belongs in sampling_params"),
        ({"text": "a", "stream": True}, "stream: not one of text, messages, input_ids, sampling_params"),
        ({"text": "a", "sampling_params": {"temperatur": 1}}, "temperatur: not a parameter of /generate's"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "max_tokens is max_new_tokens here"),
        ({"text": "a", "sampling_params": {"top_k": "x"}}, "top_k: expected `int`, got `str`"),
        ({"text": "a", "sampling_params": {"use_beam_search": True}}, "use_beam_search is not supported"),
        ({"text": "a", "sampling_params": {"n": 2}}, "n: one answer is verified for each line, got 2"),
        ({"text": "a", "sampling_params": {"regex": 3}}, "regex: expected a string"),
    ],
)
def test_a_bad_line_is_status_2_and_named(
    line: str | dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_bytes(b'{"text": "fine"}\n\n' + text.encode(errors="surrogateescape") + b"\n")
    assert main(["verify", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"{file}, line 3: {said}" in output.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/nowhere.jsonl",), "/nowhere.jsonl: No such file or directory"),
        (("/dev/null",), "/dev/null: has no prompts"),
        (("--audit-rate", "0.5"), "--audit-rate: verify audits every prompt"),
        (("--port", "1"), "--port: verify starts no HTTP server"),
        (("--skip-tokenizer-init",), "line 1: messages: this server has no tokenizer"),
        (("--speculative-simulate-acc-len", "2"), "--speculative-simulate-acc-len: makes acceptance synthetic"),
    ],
)
def test_a_mistake_in_words_is_status_2(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_faults_of_an_earlier_run_are_left_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "faults.jsonl"
    file.write_text("".join(f'{{"number": {number}}}\n' for number in range(3)))
    audit = changed(NOTHING_AUDITED, fault_file=str(file), faults_written=2)
    assert _records(audit) == [{"number": 1}, {"number": 2}]
