"""`--adapt-save`: writes a head that has taken over, in a thread, as a checkpoint that can be served.

A directory holds the newest one. What cannot be written is a line in the log, and the head serves all the same.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from overlap_spec.config import SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft.learner import Learner
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.train_draft import state

log = logging.getLogger(__name__)


class Saver:
    """Owner of the directory. `spec`: of the draft, whose config.json is that of what it has become."""

    def __init__(self, output: Path, spec: SpecSettings, target: LoadedTarget) -> None:
        """Raises: ConfigError naming the flag if there can be no such directory."""
        self._output, self._config = output, dict[str, Any]()
        if spec.draft_path is not None:
            self._config = dict(DraftSource.for_target(spec.draft_path, target).config())
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("adapt_save", f"{output}: {error.strerror or error}") from None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()

    def save(self, learner: Learner) -> None:
        """Begin to write what serves now. One that is still being written is not waited for: this one is left out."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("--adapt-save: the version before is still being written to %s: this one is not", self._output)
            return
        self._copied.clear()
        self._thread = threading.Thread(target=self._write, args=(learner,), daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Until the weights may change: a copy of them is in the host's memory."""
        self._copied.wait()

    def finish(self) -> None:
        """Until the newest one is written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, learner: Learner) -> None:
        try:
            try:
                tensors = {name: tensor.cpu().clone() for name, tensor in learner.live.tensors().items()}
            finally:
                self._copied.set()
            state.write_checkpoint(self._output, tensors, learner.copy.buffers(), self._config)
            log.info("--adapt-save: %s has the head that serves now; it can remember what it has read", self._output)
        except ConfigError as error:
            log.warning("--adapt-save: %s", error)
