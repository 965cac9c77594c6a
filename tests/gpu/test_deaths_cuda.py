"""The run of tests/soak/test_deaths.py on a GPU; `--seconds 480` is 8 minutes, with nothing else on the GPU."""

from collections.abc import Callable

import pytest
import torch
from support.soak.deaths import death_run

SHORT_S = 30.0


@pytest.mark.timeout(2 * 3600)
def test_answers_are_a_plain_servers_while_processes_die_on_a_gpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, record_summary: Callable[..., None]
) -> None:
    given, seed = request.config.getoption("--seconds"), int(request.config.getoption("--seed"))
    directory = tmp_path_factory.mktemp("deaths")
    figures = death_run(directory, "cuda", seed, float(given or SHORT_S), alone=given is not None)
    record_summary("deaths", {"seed": seed, **figures}, torch.cuda.get_device_name())
