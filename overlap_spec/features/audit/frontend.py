"""The audit's part of the frontend: it follows the requests that are chosen, and answers `/audit`."""

import secrets

from overlap_spec.client.link import ClientLink
from overlap_spec.features.audit.auditor import Auditor
from overlap_spec.features.audit.messages import Audited
from overlap_spec.features.audit.noise import FLOORS, BatchNoise
from overlap_spec.features.audit.transcripts import FaultFile, Transcript
from overlap_spec.messages import (
    Admit,
    AuditReply,
    AuditRoom,
    EngineLimits,
    Finish,
    GetAudit,
    Message,
    Recover,
    TextDeltas,
    ToTokenizer,
    find,
)
from overlap_spec.tokenizer.followers import Follower
from overlap_spec.tokenizer.hooks import Parts, RequestHook
from overlap_spec.tokenizer.open_requests import OpenRequest
from overlap_spec.tokenizer.output import Piece
from overlap_spec.tokenizer.request_checks import RequestChecks
from overlap_spec.tokenizer.steps import Gains, Run


def attach(parts: Parts) -> RequestHook:
    """The audit that the flags ask for."""
    settings, seed = parts.settings, parts.settings.scheduler.seed
    noise, faults = BatchNoise(FLOORS[settings.model.dtype]), FaultFile(settings.audit.file, settings)
    auditor = Auditor(settings.audit, noise, faults, parts.scheduler.send)
    auditor.key = secrets.token_bytes(8) if seed is None else seed.to_bytes(8, "little")
    return AuditHook(auditor, parts.checks, parts.clients)


class AuditHook(RequestHook):
    """Tells the auditor what was served, and what came of its runs."""

    def __init__(self, auditor: Auditor, checks: RequestChecks, clients: ClientLink) -> None:
        self.auditor = auditor
        self._checks = checks
        self._clients = clients

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower | None:
        """A follower of a request that is chosen."""
        transcript = self.auditor.opened(request.name, admit)
        return None if transcript is None else Served(transcript, self.auditor)

    def message(self, message: ToTokenizer) -> bool:
        """Raises: AuditFault where a fault is to end the engine."""
        match message:
            case EngineLimits():
                room = find(message.extensions, AuditRoom)
                self.auditor.num_slots = 0 if room is None else room.num_slots
            case Audited():
                self.auditor.audited(message)
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


class Served(Follower):
    """Keeps what an audit will compare: the tokens that are served."""

    __slots__ = ("_auditor", "transcript")

    def __init__(self, transcript: Transcript, auditor: Auditor) -> None:
        self.transcript = transcript
        self._auditor = auditor

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        """Add what is served of each step."""
        for step_id, tokens in run.by_step(piece.token_ids):
            self.transcript.add(step_id, tokens)

    def closed(self, finish: Finish | None) -> None:
        """It may be run again, if it has come to its end."""
        if finish is None:
            self._auditor.not_finished()
        else:
            self._auditor.finished(self.transcript, finish)
