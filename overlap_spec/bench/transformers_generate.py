"""Runs transformers' `generate` as a benchmark's baseline, in the faster of two environments.

It runs in a process of its own (`baseline.py`), with as many threads as the worker. The two environments differ in how
OpenMP threads wait: as by default, or as in the worker. The first turn tries both; later turns keep the faster one.
"""

import json
import subprocess
import sys
from typing import Any

from overlap_spec.bench.workload import Workload
from overlap_spec.config import Settings, child_environment, own_environment


class TransformersGenerate:
    """transformers on the prompts of one workload."""

    def __init__(self, settings: Settings, workload: Workload) -> None:
        self._settings = settings
        self._workload = workload
        self.environments = {"its own": own_environment(), "as the worker's": child_environment(settings, "worker")}

    def measure(self) -> dict[str, Any]:
        """Figures of the faster environment, which later calls keep. Raises: RuntimeError."""
        figures = [self._run(name) | {"threads wait": name} for name in self.environments]
        fastest = max(figures, key=lambda row: row["tokens_per_second"])
        self.environments = {name: self.environments[name] for name in (fastest["threads wait"],)}
        return fastest

    def _run(self, name: str) -> dict[str, Any]:
        files, workload = self._settings.model.files, self._workload
        command = [sys.executable, "-m", "overlap_spec.bench.baseline", files.weights, str(files.tokenizer_dir)]
        done = subprocess.run(
            [*command, str(workload.num_tokens), str(self._settings.num_threads), self._settings.model.device],
            input=json.dumps(workload.texts()),
            env=self.environments[name],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the transformers baseline failed: {done.stderr[-2000:]}")
        measured: dict[str, Any] = json.loads(done.stdout)
        return measured
