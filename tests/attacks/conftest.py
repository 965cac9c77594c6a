"""One server of each kind that cases ask for, on cores that are busy with other work, and the file of what was seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.attacks.play import busy_cores
from support.attacks.servers import SERVERS, AttackedServer, write_model

NUM_SPINNERS = 2  # as many as the cores of the machines that CI has


@pytest.fixture(scope="session")
def is_quiet() -> bool:
    """A GPU machine has nothing else to do."""
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("attacked"))


@pytest.fixture(scope="session", autouse=True)
def _busy_cores(is_quiet: bool, request: pytest.FixtureRequest) -> Iterator[None]:
    given = request.config.getoption("--spinners")
    with busy_cores(0 if is_quiet else NUM_SPINNERS if given is None else int(given)):
        yield


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AttackedServer]]:
    """By kind. Those that no case has asked for have not been started."""
    found = {kind: AttackedServer(kind, model, tmp_path_factory.mktemp) for kind in SERVERS}
    yield found
    for each in found.values():
        each.replace()


@pytest.fixture
def attacked(kind: str, servers: dict[str, AttackedServer]) -> AttackedServer:
    """The server of this kind; cases are in the order of kinds, so the others are not needed any more."""
    for other, server in servers.items():
        if other != kind:
            server.replace()
    return servers[kind]
