"""What the audit keeps of a request: what was asked, and every step's tokens as they were served.

A request with a fault is written to a file of faults: one line of JSON with all that is needed to run it again.
"""

import os
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.client.link import pack_ids, unpack_ids
from overlap_spec.config import Settings, cache_directory
from overlap_spec.config.keys import open_private
from overlap_spec.features.audit import Audit
from overlap_spec.messages import Admit, Difference
from overlap_spec.version import __version__

MOST_FAULTS = 1000
MOST_BYTES = 64 << 20


class Transcript:
    """One request that was chosen when it came."""

    def __init__(self, request_id: str, admit: Admit) -> None:
        self.request_id = request_id
        self.admit = admit
        self.output = array("i")  # served: cut where the text is cut
        self.steps: list[tuple[int, int]] = []  # id of each step, and how many of its tokens were served

    def add(self, step_id: int, tokens: list[int]) -> None:
        """A step's tokens were served."""
        self.output.extend(tokens)
        self.steps.append((step_id, len(tokens)))

    @property
    def num_bytes(self) -> int:
        """What it takes of a bounded backlog."""
        grammar = self.admit.sampling.grammar
        of_grammar = 0 if grammar is None else len(grammar.text)
        return len(self.admit.prompt) + 4 * len(self.output) + 16 * len(self.steps) + of_grammar

    @property
    def prompt_len(self) -> int:
        return len(self.admit.prompt) // self.output.itemsize

    def audit(self, num_before: int = 0) -> Audit:
        """The message that has it run again, after so many runs in other shapes."""
        return Audit(self.admit, pack_ids(self.output), control=num_before % 2 == 1, cut=num_before // 2)

    def step_of(self, index: int) -> int:
        """The id of the step that committed output token `index`."""
        for step_id, count in self.steps:
            index -= count
            if index < 0:
                return step_id
        raise IndexError("past the last token")


def engine_facts(settings: Settings) -> dict[str, Any]:
    """What a fault depends on beside its request."""
    from overlap_spec.runtime.source import describe_source  # slow, and seldom needed

    model, spec = settings.model, settings.spec
    return {
        "version": __version__,
        **describe_source().describe(),
        "model": model.name,
        "dtype": model.dtype,
        "device": model.device,
        "speculation": msgspec.to_builtins(spec),
        "steps_in_flight": settings.scheduler.depth,
        "logit_processor": settings.logit_processor,
    }


class FaultFile:
    """Made with the first fault. It takes `MOST_FAULTS` lines and `MOST_BYTES` bytes. `settings`: None in tests."""

    def __init__(self, path: str | None = None, settings: Settings | None = None) -> None:
        self.path = Path(path) if path is not None else _own_path()
        self._settings = settings
        self._facts: dict[str, Any] | None = None
        self.num_written = 0
        self._num_bytes = 0

    def write(self, transcript: Transcript, faults: list[Difference]) -> None:
        """Write the faults of one request as one line, unless the file is full. Raises: OSError."""
        line = msgspec.json.encode(self._record(transcript, faults)) + b"\n"
        if self.num_written >= MOST_FAULTS or self._num_bytes + len(line) > MOST_BYTES:
            return
        with open_private(self.path, "ab") as file:  # it holds the prompt and the answer
            file.write(line)
        self.num_written += 1
        self._num_bytes += len(line)

    def _record(self, transcript: Transcript, faults: list[Difference]) -> dict[str, Any]:
        if self._facts is None:
            self._facts = engine_facts(self._settings) if self._settings is not None else {}
        admit = transcript.admit
        return {
            "faults": [msgspec.structs.asdict(fault) for fault in faults],
            "prompt_ids": unpack_ids(admit.prompt),
            "output_ids": transcript.output.tolist(),
            "sampling": msgspec.structs.asdict(admit.sampling),
            "stop_ids": list(admit.stop_ids),
            "step_ids": [step_id for step_id, _ in transcript.steps],
            "step_tokens": [count for _, count in transcript.steps],
            "time": time.time(),
            "engine": self._facts,
        }


def _own_path() -> Path:
    return Path(cache_directory(), "audit", f"faults-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl")
