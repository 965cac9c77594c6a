"""The addresses of one run: sockets in its private directory."""

from pathlib import Path


class Endpoints:
    """One inbox per actor, step links, and the client link. The directory's mode is 0700.

    Processes that are started again get addresses of their own `generation`: no message of one that is gone reaches
    them. Supervisor and clients keep theirs.
    """

    def __init__(self, run_dir: Path, generation: int = 0) -> None:
        self.run_dir = run_dir
        self._suffix = f".{generation}" if generation else ""

    def inbox(self, actor: str) -> str:
        """Where an actor reads."""
        return f"ipc://{self.run_dir / actor}{self._suffix}.sock"

    def supervisor(self) -> str:
        """Where the supervisor reads."""
        return f"ipc://{self.run_dir / 'supervisor.sock'}"

    def steps(self, actor: str) -> Path:
        """Where an actor reads plans or results (`step_link.py`)."""
        return self.run_dir / f"{actor}{self._suffix}.steps"

    def client(self) -> str:
        """The client link, where no public address is set."""
        return f"ipc://{self.run_dir / 'client.sock'}"
