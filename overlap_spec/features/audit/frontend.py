"""The audit's part of the frontend: it has finished requests run again by plain decoding, and judges what differs.

    chosen -> backlog -> first run --no control is due----------------------------------------> judged
                             `-----> control, at another batch size --no suspect is left-------^
                                                `-------> runs in other shapes, up to `RUNS` --^

A control is due for one request in 16, by its number; for all of them until the noise of batch shapes is known; and
wherever a margin exceeds it. A difference that does so in both runs is a suspect. It is a *fault* if noise does not
explain it in any run (`noise.py`), else a *near-tie*, as all other differences are.
"""

import hashlib
import logging
import secrets
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from overlap_spec.client.link import ClientLink
from overlap_spec.config import AuditSettings
from overlap_spec.errors import OverlapSpecError
from overlap_spec.features.audit import Audit, Audited, StopSpeculating
from overlap_spec.features.audit.noise import FLOORS, BatchNoise
from overlap_spec.features.audit.transcripts import FaultFile, Transcript
from overlap_spec.frontend import open_requests
from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.open_requests import Follower, Gains, OpenRequest
from overlap_spec.frontend.output import Piece
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.messages import (
    BOUNDLESS,
    Admit,
    AuditFigures,
    AuditReply,
    AuditReport,
    AuditRoom,
    Difference,
    EngineLimits,
    Finish,
    FinishKind,
    GetAudit,
    Memo,
    Message,
    Recover,
    TextDeltas,
    ToFrontend,
    find,
)

MOST_WAITING = 4096  # requests in the backlog
MOST_BYTES = 64 << 20  # of their transcripts
NAME = "audit"  # of the memo
LOST = "the worker or the scheduler died meanwhile"
FORGOTTEN = "the frontend died meanwhile"
NOT_FINISHED = "aborted or failed before its end"
CONTROL_EVERY = 16
RECENT = 1000  # differences that the report holds, of each kind
LOG_S = 600.0  # between summaries; between faults that are logged, a tenth of it

Dropped = dict[str, int]  # how many, by the reason

log = logging.getLogger(__name__)


def attach(parts: Parts) -> RequestHook:
    """The audit that the flags ask for."""
    settings, seed = parts.settings, parts.settings.scheduler.seed
    noise = BatchNoise(FLOORS[settings.model.dtype], settings.model.deterministic)
    faults = FaultFile(settings.audit.file, settings)
    auditor = Auditor(settings.audit, noise, faults, parts.scheduler.send)
    auditor.key = secrets.token_bytes(8) if seed is None else seed.to_bytes(8, "little")
    return AuditHook(auditor, parts.checks, parts.clients)


class AuditFault(OverlapSpecError):
    """The engine was asked to end at the first fault (`--audit-action stop`)."""


@dataclass(frozen=True)
class Run:
    """What plain decoding draws for the tokens of a request from `first` on, and the margins of those served.

    As far as it came.
    """

    drawn: "array[int]"
    margins: "array[float]"
    first: int = 0

    @classmethod
    def of(cls, message: Audited) -> "Run":
        drawn, margins = array("i"), array("d")
        drawn.frombytes(message.drawn)
        margins.frombytes(message.margins)
        return cls(drawn, margins, message.first)

    def cut(self, num_tokens: int) -> "Run":
        return Run(self.drawn[:num_tokens], self.margins[:num_tokens], self.first)


@dataclass
class Running:
    """A request that is being run. `runs`: those that have ended."""

    transcript: Transcript
    runs: list[Run] = field(default_factory=list)


def differences(transcript: Transcript, runs: list[Run]) -> Iterator[tuple[int, list[float]]]:
    """Which served tokens plain decoding has not drawn, and by which margins its own are ahead, in each run."""
    first = runs[0].first
    compared = zip(transcript.output[first:], runs[0].drawn, *(run.margins for run in runs), strict=False)
    for i, (served, drawn, *margins) in enumerate(compared, first):
        if served != drawn:
            yield i, [-margin for margin in margins]


class Auditor:
    """Owner of the backlog and of all that was found. `send`: to the scheduler."""

    def __init__(
        self,
        settings: AuditSettings,
        noise: BatchNoise,
        faults: FaultFile,
        send: Callable[[Audit | StopSpeculating | Memo], None],
    ) -> None:
        self.num_slots = 0  # requests that are run at once; unknown until the engine is warm
        self.key = b""  # of the choice
        self._settings = settings
        self._noise = noise
        self._file = faults
        self._send = send
        self._backlog: deque[Transcript] = deque()
        self._backlog_bytes = 0
        self._running: dict[int, Running] = {}
        self._figures = AuditFigures()
        self._dropped: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._near_ties: deque[Difference] = deque(maxlen=RECENT)
        self._faults: deque[Difference] = deque(maxlen=RECENT)
        self._logged_at = self._fault_logged_at = -LOG_S

    # --- requests -------------------------------------------------------------------------------------------

    def opened(self, request_id: str, admit: Admit) -> Transcript | None:
        """A request was admitted. Returns what is to be kept of it if it is chosen."""
        if not self.num_slots or not self._chooses(admit.uid):
            return None
        return Transcript(request_id, admit)

    def finished(self, transcript: Transcript, finish: Finish) -> None:
        """A chosen request has been served."""
        if finish.kind is FinishKind.ABORT:
            self._skipped[NOT_FINISHED] += 1
        elif not transcript.output:
            self._skipped["no tokens"] += 1
        elif len(self._backlog) >= MOST_WAITING or self._backlog_bytes + transcript.num_bytes > MOST_BYTES:
            self._dropped["the backlog is full"] += 1
        else:
            self._backlog.append(transcript)
            self._backlog_bytes += transcript.num_bytes
            self._start()

    def not_finished(self) -> None:
        """A chosen request was aborted, or has failed."""
        self._skipped[NOT_FINISHED] += 1

    def restarted(self) -> None:
        """Scheduler and worker were started again: what ran is lost, the rest goes on."""
        self._dropped.update([LOST] * len(self._running))
        self._running.clear()
        if not self._figures.speculating:
            self._send(StopSpeculating())
        self._start()

    def remember(self, state: bytes) -> None:
        """Count on from what the frontend before has noted. What it had in its backlog is lost."""
        figures, dropped, skipped = msgspec.msgpack.decode(state, type=tuple[AuditFigures, Dropped, Dropped])
        self._figures, self._dropped, self._skipped = figures, Counter(dropped), Counter(skipped)
        self._dropped[FORGOTTEN] += figures.backlog

    def _note(self) -> None:
        """Let the scheduler keep the figures, for another frontend."""
        figures = replace(self._figures, backlog=len(self._backlog) + len(self._running))
        self._send(Memo(NAME, msgspec.msgpack.encode((figures, self._dropped, self._skipped))))

    def _chooses(self, uid: int) -> bool:
        digest = hashlib.blake2b(uid.to_bytes(8, "little"), digest_size=8, key=self.key).digest()
        return int.from_bytes(digest, "little") < self._settings.rate * 2**64

    def _start(self) -> None:
        while self._backlog and len(self._running) < self.num_slots:
            transcript = self._backlog.popleft()
            self._backlog_bytes -= transcript.num_bytes
            self._running[transcript.admit.uid] = Running(transcript)
            self._send(transcript.audit())

    # --- outcomes -------------------------------------------------------------------------------------------

    def audited(self, message: Audited) -> None:
        """A run has ended. Raises: AuditFault where a fault is to end the engine."""
        running, run = self._running[message.uid], Run.of(message)
        running.runs.append(run)
        if self._wants_another(running):
            self._send(running.transcript.audit(len(running.runs)))
            return
        runs = [each for each in running.runs if each.drawn]
        if run.drawn or len(runs) > 1:
            shortest = min(len(each.drawn) for each in runs)
            self._judge(running.transcript, [each.cut(shortest) for each in runs])
        self._dropped.update([message.dropped] if message.dropped else [])
        self._figures = replace(self._figures, requests=self._figures.requests + (not message.dropped))
        del self._running[message.uid]
        self._start()
        self._note()
        self._log_summary()

    def _wants_another(self, running: Running) -> bool:
        """Whether a control is due, or what would be a fault by the runs so far must be seen in more."""
        runs = running.runs
        if not runs[-1].drawn or len(runs) >= self._noise.runs_of_suspects:
            return False
        is_due = not self._noise.is_measured or running.transcript.admit.uid % CONTROL_EVERY == 0
        found = differences(running.transcript, runs)
        return (is_due and len(runs) == 1) or any(self._noise.is_fault(margins) for _, margins in found)

    def _judge(self, transcript: Transcript, runs: list[Run]) -> None:
        run, control = runs[0], runs[1] if len(runs) > 1 else None
        if control is not None:
            self._noise.add(run.margins, control.margins)
        found = self._differences(transcript, runs)
        faults = [difference for difference in found if difference.is_fault]
        self._near_ties.extend(difference for difference in found if not difference.is_fault)
        self._faults.extend(faults)
        before, num_tokens = self._figures, len(run.drawn)
        num_changed = sum(one != other for one, other in zip(run.drawn, control.drawn, strict=True)) if control else 0
        self._figures = replace(
            before,
            tokens=before.tokens + num_tokens,
            near_ties=before.near_ties + len(found) - len(faults),
            faults=before.faults + len(faults),
            control_tokens=before.control_tokens + (num_tokens if control else 0),
            control_differences=before.control_differences + num_changed,
        )
        if faults:
            self._report_faults(transcript, faults)

    def _differences(self, transcript: Transcript, runs: list[Run]) -> list[Difference]:
        return [
            Difference(
                request_id=transcript.request_id,
                position=transcript.prompt_len + i,
                step_id=transcript.step_of(i),
                served=transcript.output[i],
                drawn=runs[0].drawn[i - runs[0].first],
                margin=_in_logits(margins[0]),
                control_margin=_in_logits(margins[1]) if len(runs) > 1 else None,
                spread=_in_logits(max(margins) - min(margins)),
                bound=self._noise.bound,
                is_fault=self._noise.is_fault(margins),
            )
            for i, margins in differences(transcript, runs)
        ]

    def _report_faults(self, transcript: Transcript, faults: list[Difference]) -> None:
        try:
            self._file.write(transcript, faults)
        except OSError as error:
            log.error("audit: faults cannot be written to %s: %s", self._file.path, error)
        first = faults[0]
        said = (
            f"audit fault: request {first.request_id!r}, position {first.position}: the token that was served is not"
            f" plain decoding's, margin {first.margin} logits, noise up to {first.bound:.2g}"
        )
        now = time.monotonic()
        if now - self._fault_logged_at >= LOG_S / 10:
            self._fault_logged_at = now
            log.error("%s; %d faults so far, in %s", said, self._figures.faults, self._file.path)
        if self._settings.action == "stop":
            raise AuditFault("audit fault: a served token is not plain decoding's (--audit-action stop)")
        if self._settings.action == "disable" and self._figures.speculating:
            self._figures = replace(self._figures, speculating=False)
            log.error("audit: speculation is off from now on (--audit-action disable)")
            self._send(StopSpeculating())

    def _log_summary(self) -> None:
        now, figures = time.monotonic(), self._figures
        if not figures.tokens or now - self._logged_at < LOG_S:
            return
        self._logged_at = now
        log.info(
            "Audit: %d requests, %d tokens, %d faults, %.2f near-ties per 10,000 tokens (plain against plain: %.2f)",
            *(figures.requests, figures.tokens, figures.faults, figures.near_ties_per_10k, figures.control_per_10k),
        )

    # --- reports --------------------------------------------------------------------------------------------

    def report(self) -> AuditReport:
        figures = replace(
            self._figures,
            backlog=len(self._backlog) + len(self._running),
            dropped=self._dropped.total(),
            skipped=self._skipped.total(),
            bound=self._noise.bound,
        )
        return AuditReport(
            rate=self._settings.rate,
            action=self._settings.action,
            why_off=self._why_off(),
            figures=figures,
            near_ties_per_10k=figures.near_ties_per_10k,
            control_per_10k=figures.control_per_10k,
            typical_noise=self._noise.quantile(0.5),
            dropped_because=dict(self._dropped),
            skipped_because=dict(self._skipped),
            fault_file=str(self._file.path) if self._file.num_written else None,
            faults_written=self._file.num_written,
            recent=[*self._faults, *self._near_ties],
        )

    def _why_off(self) -> str:
        if self._settings.rate == 0:
            return "--audit-rate is 0"
        return "" if self.num_slots else "the method's verification does not commit plain decoding's tokens"


def _in_logits(margin: float) -> float | None:
    """None: no margin can be told."""
    return margin if abs(margin) < BOUNDLESS else None


class Served(Follower):
    """Keeps what an audit will compare: the tokens that are served."""

    __slots__ = ("_auditor", "transcript")

    def __init__(self, transcript: Transcript, auditor: Auditor) -> None:
        self.transcript = transcript
        self._auditor = auditor

    def gained(self, gains: Gains, run: open_requests.Run, piece: Piece, reply: TextDeltas) -> None:
        for step_id, tokens in run.by_step(piece.token_ids):
            self.transcript.add(step_id, tokens)

    def closed(self, finish: Finish | None) -> None:
        """It may be run again, if it has come to its end."""
        if finish is None:
            self._auditor.not_finished()
        else:
            self._auditor.finished(self.transcript, finish)


class AuditHook(RequestHook):
    """Tells the auditor what was served, and what came of its runs."""

    def __init__(self, auditor: Auditor, checks: RequestChecks, clients: ClientLink) -> None:
        self.auditor = auditor
        self._checks = checks
        self._clients = clients

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower | None:
        """A follower of a request that is chosen. Of one that another frontend has begun, the whole is not known."""
        if admit.resumed is not None:
            return None
        transcript = self.auditor.opened(request.name, admit)
        return None if transcript is None else Served(transcript, self.auditor)

    def message(self, message: ToFrontend) -> bool:
        """Raises: AuditFault where a fault is to end the engine."""
        match message:
            case EngineLimits():
                room = find(message.extensions, AuditRoom)
                self.auditor.num_slots = 0 if room is None else room.num_slots
            case Audited():
                self.auditor.audited(message)
                return True
            case Memo(feature=feature) if feature == NAME:
                self.auditor.remember(message.state)
                return True
        return False

    def recovered(self, message: Recover) -> None:
        """What ran is lost."""
        self.auditor.restarted()

    def query(self, client: int, message: Message) -> bool:
        """Answer GetAudit."""
        if not isinstance(message, GetAudit):
            return False
        self._checks.check_admin(message.key)
        self._clients.send(client, AuditReply(message.request_id, self.auditor.report()))
        return True
