"""The addresses of one run: sockets in its private directory."""

from pathlib import Path


class Endpoints:
    """One inbox per actor, step links, and the client link. The directory's mode is 0700."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def inbox(self, actor: str) -> str:
        """Where an actor (or the supervisor) reads."""
        return f"ipc://{self.run_dir / actor}.sock"

    def steps(self, actor: str) -> Path:
        """Where an actor reads plans or results (`step_link.py`)."""
        return self.run_dir / f"{actor}.steps"

    def client(self) -> str:
        """The client link, where no public address is set."""
        return f"ipc://{self.run_dir / 'client.sock'}"
