"""Worker, scheduler and frontend are killed and stopped under seeded requests of all parameters: nothing is lost.

    python -m pytest -m slow tests/soak/test_deaths.py --seconds 1200 --summaries FILE    # 20 minutes
    python -m pytest -m cuda tests/gpu/test_deaths_cuda.py --seconds 480 --summaries FILE   # 8 minutes on a GPU

Both servers compute in float32, the plain one without speculation. Each answer is the plain server's, none ends early,
and no process grows.
"""

from collections.abc import Callable

import pytest
from support.soak.deaths import death_run

CI_S = 40.0  # `.ci/run` has 40 seconds of deaths: each kind of process dies and hangs under every parameter


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_answers_are_a_plain_servers_while_processes_die(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, record_summary: Callable[..., None]
) -> None:
    seconds, seed = float(request.config.getoption("--seconds") or CI_S), int(request.config.getoption("--seed"))
    figures = death_run(tmp_path_factory.mktemp("deaths"), "cpu", seed, seconds)
    record_summary("deaths", {"seed": seed, **figures})


@pytest.mark.full
@pytest.mark.timeout(2 * 3600)
def test_answers_are_a_plain_servers_while_ranks_die(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, record_summary: Callable[..., None]
) -> None:
    """Each rank is killed and stopped; the plain server has one."""
    seconds, seed = float(request.config.getoption("--seconds") or CI_S), int(request.config.getoption("--seed"))
    figures = death_run(tmp_path_factory.mktemp("deaths"), "cpu", seed, seconds, ranks=2)
    record_summary("deaths_of_ranks", {"seed": seed, **figures})
