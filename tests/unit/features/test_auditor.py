"""The auditor's verdicts on served and replayed tokens, by their margins. A list stands for the scheduler."""

import json
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from overlap_spec.config import AuditSettings
from overlap_spec.features.audit import Audit, Audited, StopSpeculating, frontend as auditor_module
from overlap_spec.features.audit.frontend import CONTROL_EVERY, MOST_WAITING, AuditFault, Auditor
from overlap_spec.features.audit.noise import ENOUGH, FACTOR, RUNS, SPREAD, BatchNoise
from overlap_spec.features.audit.transcripts import FaultFile
from overlap_spec.messages import Admit, Finish, FinishKind, Memo, SamplingParams

FLOOR = 0.5
SERVED = [11, 12, 13, 14]
SURE = [9.0, 9.0, 9.0, 9.0]  # margins of tokens that plain decoding draws too
END = Finish(FinishKind.LENGTH)


@dataclass
class Bench:
    """An auditor. `wrong` in `runs`: tokens that plain decoding draws instead, with the margins, by index."""

    file: Path
    settings: AuditSettings = AuditSettings(1.0)
    measured: bool = True
    exact: bool = False  # as with --enable-deterministic-inference
    num_slots: int = 2
    sent: list[Audit | StopSpeculating | Memo] = field(default_factory=list)

    def __post_init__(self) -> None:
        noise = BatchNoise(FLOOR, self.exact)
        if self.measured:
            noise.add(array("d", [1.0] * ENOUGH), array("d", [1.0] * ENOUGH))
        self.auditor = Auditor(self.settings, noise, FaultFile(str(self.file)), self.sent.append)
        self.auditor.num_slots = self.num_slots

    def serve(self, uid: int, finish: Finish = END, served: list[int] = SERVED) -> None:
        """A request in two steps."""
        sampling = SamplingParams(max_new_tokens=len(served), seed=1)
        transcript = self.auditor.opened(f"r{uid}", Admit(uid, array("i", [7, 8, 9]).tobytes(), sampling, (), 0.0))
        assert transcript is not None
        transcript.add(20, served[:3])
        transcript.add(22, served[3:])
        self.auditor.finished(transcript, finish)

    def audited(self, uid: int, wrong: dict[int, float] | None = None, cut: int = 4, dropped: str = "") -> None:
        drawn = [99 if i in (wrong or {}) else token for i, token in enumerate(SERVED)][:cut]
        margins = [-(wrong or {}).get(i, -margin) for i, margin in enumerate(SURE)][:cut]
        self.auditor.audited(Audited(uid, array("i", drawn).tobytes(), array("d", margins).tobytes(), dropped))

    def run(self, uid: int, *runs: dict[int, float]) -> None:
        """A request, served and audited; there are as many runs as the auditor wants."""
        before = len(self.sent)
        self.serve(uid)
        for wrong in runs:
            self.audited(uid, wrong)
        shapes = [(each.control, each.cut) for each in self.audits_since(before)]
        assert shapes == [(bool(number % 2), number // 2) for number in range(len(runs))]

    def suspect(self, uid: int, *runs: dict[int, float]) -> None:
        """A request that is run as often as a fault needs. The last of `runs` stands for those after it."""
        self.run(uid, *runs, *[runs[-1]] * (RUNS - len(runs)))

    def audits_since(self, num_sent: int) -> list[Audit]:
        """What was sent after so many messages."""
        return [each for each in self.sent[num_sent:] if isinstance(each, Audit)]

    @property
    def counts(self) -> tuple[int, int]:
        """Near-ties and faults."""
        figures = self.auditor.report().figures
        return figures.near_ties, figures.faults


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One that has had a request with a control."""
    bench = Bench(tmp_path / "faults.jsonl")
    bench.run(CONTROL_EVERY, {}, {})
    return bench


def test_a_margin_within_the_noise_is_a_near_tie(bench: Bench) -> None:
    bench.run(2, {1: FLOOR})
    assert bench.counts == (1, 0) and not bench.file.exists()


def test_a_margin_beyond_the_noise_in_every_run_is_a_fault(bench: Bench) -> None:
    bench.suspect(2, {1: FLOOR + 0.1}, {1: FLOOR + 0.2})
    (fault,) = bench.auditor.report().recent
    assert fault.is_fault and (fault.served, fault.drawn) == (12, 99)
    assert (fault.position, fault.step_id) == (3 + 1, 20) and fault.bound == FLOOR
    assert (fault.margin, fault.control_margin) == (FLOOR + 0.1, FLOOR + 0.2)
    assert fault.spread == pytest.approx(0.1)


@pytest.mark.parametrize("margin", [0.0, 1e-9, FLOOR, 3.0])
def test_where_all_bits_are_promised_any_other_token_is_a_fault(tmp_path: Path, margin: float) -> None:
    """Whatever the second run says, and however close the logits are."""
    bench = Bench(tmp_path / "faults.jsonl", exact=True)
    bench.run(CONTROL_EVERY, {}, {})
    bench.run(2, {1: margin}, {})
    (fault,) = bench.auditor.report().recent
    assert bench.counts == (0, 1) and (fault.position, fault.bound) == (3 + 1, 0.0)


def test_tokens_are_compared_from_the_first_on_that_plain_decoding_draws(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "faults.jsonl", exact=True)
    bench.serve(1)
    for margin in (-3.0, 2.0):  # the first run, and its control
        drawn, margins = array("i", [12, 99, 14]), array("d", [9.0, margin, 9.0])
        bench.auditor.audited(Audited(1, drawn.tobytes(), margins.tobytes(), first=1))
    (fault,) = bench.auditor.report().recent
    assert (fault.position, fault.served, fault.drawn, fault.margin, fault.control_margin) == (3 + 2, 13, 99, 3.0, -2.0)
    assert bench.auditor.report().figures.tokens == 3


@pytest.mark.parametrize("second", [{}, {1: FLOOR}], ids=["none", "within the noise"])
def test_a_margin_that_the_second_run_does_not_have_is_a_near_tie(bench: Bench, second: dict[int, float]) -> None:
    bench.run(2, {1: 3.0}, second)
    assert bench.counts == (1, 0)


def test_where_other_shapes_change_a_margin_by_as_much_it_is_a_near_tie(bench: Bench) -> None:
    """At a tipping point of the model: noise is larger there than anywhere else."""
    least = FLOOR + 0.5
    bench.run(2, {1: least}, {1: least + 0.2}, {1: least + least / SPREAD})
    bench.suspect(3, {1: least}, {1: least + 0.2}, {1: least + 0.9 * least / SPREAD})
    assert bench.counts == (1, 1)
    fault, near_tie = bench.auditor.report().recent
    assert (fault.request_id, near_tie.spread) == ("r3", least / SPREAD)


def test_a_suspect_whose_later_runs_come_to_nothing_is_judged_by_those_before(bench: Bench) -> None:
    bench.serve(2)
    for cut in (4, 3, 0):
        bench.audited(2, {1: 3.0}, cut=cut, dropped="" if cut else "requests needed its pages")
    assert bench.counts == (0, 1) and not bench.auditor.report().figures.backlog


@pytest.mark.parametrize("index", range(4))
def test_a_fault_is_found_at_any_token(bench: Bench, index: int) -> None:
    bench.suspect(2, {index: 3.0})
    (fault,) = bench.auditor.report().recent
    assert fault.position == 3 + index and fault.step_id == (20 if index < 3 else 22)


def test_a_difference_does_not_hide_the_next(bench: Bench) -> None:
    bench.suspect(2, {0: 0.1, 1: 3.0, 3: 4.0})
    assert bench.counts == (1, 2)
    record = msgspec.json.decode(bench.file.read_bytes())
    assert [fault["position"] for fault in record["faults"]] == [4, 6]
    assert record["prompt_ids"] == [7, 8, 9] and record["output_ids"] == SERVED
    assert (record["step_ids"], record["step_tokens"]) == ([20, 22], [3, 1])


def test_a_forbidden_token_has_no_margin(bench: Bench) -> None:
    bench.suspect(2, {2: 1e30})
    (fault,) = bench.auditor.report().recent
    assert fault.is_fault and fault.margin is None and fault.control_margin is None


def test_every_16th_request_has_a_control(bench: Bench) -> None:
    for uid in range(1, 2 * CONTROL_EVERY + 1):
        bench.run(uid, *({} for _ in range(1 if uid % CONTROL_EVERY else 2)))
    figures = bench.auditor.report().figures
    assert figures.requests == 2 * CONTROL_EVERY + 1 and figures.tokens == 4 * figures.requests
    assert figures.control_tokens == 4 * 3 and figures.control_differences == 0


def test_of_16_requests_that_end_together_one_has_a_control(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "faults.jsonl", num_slots=CONTROL_EVERY)
    for uid in range(CONTROL_EVERY):
        bench.serve(uid)
    for uid in range(CONTROL_EVERY):
        bench.audited(uid)
    assert sum(each.control for each in bench.audits_since(0)) == 1


def test_every_request_has_a_control_until_the_noise_is_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "faults.jsonl", measured=False)
    for uid in range(1, ENOUGH // 4 + 1):
        bench.run(uid, {}, {})
    bench.run(uid + 1, {})


def test_what_two_runs_differ_by_is_counted_and_is_noise(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "faults.jsonl", measured=False)
    bench.run(1, {0: 2.0}, {0: 1.0})  # the served token was behind by 2 logits, or by 1
    report = bench.auditor.report()
    assert report.figures.bound == FACTOR and bench.counts == (1, 0)
    assert report.figures.control_differences == 0
    bench.run(2, {}, {3: 0.1})
    assert bench.auditor.report().figures.control_differences == 1


def test_disable_switches_speculation_off_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "faults.jsonl", AuditSettings(1.0, "disable"))
    for uid in (1, 2):
        bench.suspect(uid, {0: 3.0})
    assert sum(isinstance(each, StopSpeculating) for each in bench.sent) == 1
    assert not bench.auditor.report().figures.speculating


def test_stop_raises_and_only_the_file_has_the_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every client reads the error; the log names the request, and has none of its tokens."""
    bench = Bench(tmp_path / "faults.jsonl", AuditSettings(1.0, "stop"))
    with pytest.raises(AuditFault, match="--audit-action stop") as raised:
        bench.suspect(1, {0: 3.0})
    (fault,) = json.loads(bench.file.read_text())["faults"]
    assert bench.file.stat().st_mode & 0o777 == 0o600
    assert repr(fault["request_id"]) in caplog.text and not re.search(r"\b(11|99)\b", caplog.text)
    assert not re.search(rf"{fault['request_id']}\b|\b(11|99)\b|{bench.file}", str(raised.value))


def test_log_goes_on(bench: Bench) -> None:
    bench.suspect(2, {0: 3.0})
    assert not any(isinstance(each, StopSpeculating) for each in bench.sent)
    assert bench.auditor.report().figures.speculating


def test_what_was_not_audited_is_counted_by_reason(bench: Bench) -> None:
    bench.serve(2, Finish(FinishKind.ABORT))
    bench.serve(3, served=[])
    bench.auditor.not_finished()
    bench.serve(4)
    bench.audited(4, cut=0, dropped="requests needed its pages")
    report = bench.auditor.report()
    assert report.skipped_because == {"aborted or failed before its end": 2, "no tokens": 1}
    assert report.dropped_because == {"requests needed its pages": 1}
    assert (report.figures.skipped, report.figures.dropped, report.figures.requests) == (3, 1, 1)
    assert not report.figures.backlog


def test_an_audit_that_ends_early_is_judged_as_far_as_it_came(bench: Bench) -> None:
    bench.serve(2)
    for _ in range(RUNS):
        bench.audited(2, {1: 3.0}, cut=2, dropped="its grammar could be followed no further")
    report = bench.auditor.report()
    assert bench.counts == (0, 1) and report.figures.requests == 1 and report.figures.tokens == 4 + 2
    assert report.dropped_because == {"its grammar could be followed no further": 1}


def test_another_frontend_counts_on_and_what_waited_is_dropped(bench: Bench, tmp_path: Path) -> None:
    bench.suspect(2, {1: 2.0 * FLOOR})
    bench.serve(3)
    bench.serve(4)
    bench.serve(5, finish=Finish(FinishKind.ABORT))
    bench.audited(3)
    before = bench.auditor.report()
    memo = [each for each in bench.sent if isinstance(each, Memo)][-1]
    other = Bench(tmp_path / "other.jsonl")
    other.auditor.remember(memo.state)
    after = other.auditor.report()
    for name in ("requests", "tokens", "faults", "near_ties", "control_tokens", "skipped", "speculating"):
        assert getattr(after.figures, name) == getattr(before.figures, name) is not None, name
    assert (after.figures.requests, after.figures.skipped, after.figures.backlog) == (3, 1, 0)
    assert after.dropped_because == {"the frontend died meanwhile": 1}
    other.run(6, {})


def test_requests_wait_in_a_bounded_backlog(bench: Bench) -> None:
    for uid in range(2, 2 + bench.num_slots + MOST_WAITING + 3):
        bench.serve(uid)
    report = bench.auditor.report()
    assert report.dropped_because == {"the backlog is full": 3}
    assert report.figures.backlog == bench.num_slots + MOST_WAITING
    num_sent = len(bench.sent)
    bench.audited(2)
    assert len(bench.audits_since(num_sent)) == 1, "the next one is started"


def test_transcripts_that_left_the_backlog_take_none_of_its_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor_module, "MOST_BYTES", 1 << 10)
    for uid in range(2, 100):
        bench.serve(uid)
        for _ in range(2):
            if uid in bench.auditor._running:
                bench.audited(uid)
    report = bench.auditor.report()
    assert not report.dropped_because and report.figures.requests == 99
    for uid in range(100, 200):
        bench.serve(uid)
    assert bench.auditor.report().dropped_because.keys() == {"the backlog is full"}, "there is such a bound"


def test_as_many_requests_are_chosen_as_were_asked_for(tmp_path: Path) -> None:
    auditor = Bench(tmp_path / "faults.jsonl", AuditSettings(0.05)).auditor
    admits = (Admit(uid, b"\0\0\0\0", SamplingParams(), (), 0.0) for uid in range(1, 10_001))
    chosen = sum(auditor.opened("r", admit) is not None for admit in admits)
    assert 400 < chosen < 600
    off = Bench(tmp_path / "faults.jsonl", num_slots=0).auditor
    assert off.opened("r", Admit(1, b"", SamplingParams(), (), 0.0)) is None and off.report().why_off


# --- the noise --------------------------------------------------------------------------------------------------------


def noise_of(changes: list[float]) -> BatchNoise:
    noise = BatchNoise(1e-9)
    noise.add(array("d", [5.0] * len(changes)), array("d", [5.0 - change for change in changes]))
    return noise


def test_few_changes_bound_the_noise_by_the_largest() -> None:
    assert noise_of([0.01, 0.04, 0.02]).bound == pytest.approx(FACTOR * 0.04)
    assert noise_of([]).bound == 1e-9


def test_many_changes_bound_it_by_all_but_one_in_a_thousand() -> None:
    noise = noise_of([0.01] * 9990 + [0.02] * 9 + [7.0])
    assert noise.is_measured and noise.bound == pytest.approx(FACTOR * 0.01, rel=0.08)
    assert noise_of([0.01] * 9989 + [0.02] * 11).bound == pytest.approx(FACTOR * 0.02, rel=0.08)
    for _ in range(100):
        noise.add(array("d", [0.01] * 100), array("d", [0.0] * 100))
    assert noise.bound == pytest.approx(FACTOR * 0.01, rel=0.08), "it does not grow with what is learnt"
    assert noise.quantile(0.5) == pytest.approx(0.01, rel=0.08)


@pytest.mark.parametrize("pair", [(float("nan"), 1.0), (1.0, float("nan")), (float("nan"), float("nan"))])
def test_margins_of_logits_that_were_not_finite_tell_nothing(pair: tuple[float, float]) -> None:
    noise = BatchNoise(1e-9)
    noise.add(array("d", pair[:1]), array("d", pair[1:]))
    assert (noise.num_margins, noise.bound) == (0, 1e-9)


def test_forbidden_tokens_tell_nothing() -> None:
    noise = BatchNoise(0.1)
    noise.add(array("d", [-1e30, 1e30, 1.0]), array("d", [2.0, -1e30, 1.25]))
    assert noise.num_margins == 1 and noise.bound == pytest.approx(0.75)
