"""Shared fixtures: the default model and its references, a tokenizer, where long runs leave their summaries."""

import functools
import gc
import itertools
import json
import logging
import os
import re
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch loads OpenMP: processes share the cores here, and a thread that waits by spinning takes one from another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Tests start many processes. Each would compile the sources anew where the environment lets none keep its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what it puts in the background with SIGINT ignored, and `nohup` with SIGHUP; children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from support.gpu_order import visible_to
from support.kept_answers import KEPT
from support.shared_bytes import damaged, mend
from support.summaries import FileResults, describe, update, without_group
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.frontend.codec import TextCodec, load_codec
from overlap_spec.hub import resolve_model
from overlap_spec.runtime.log_limits import LineLimits

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # workers share the cores
    import torch  # not in the process that starts workers, which wait for it

    torch.set_num_threads(1)
    # CUDA reads this as it starts: neither imports nor torch's count of devices (by NVML) start it.
    if visible := visible_to(worker, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible

# Each client of httpx, and each call without one, would read all certificates, 30 ms: those of tests talk plain HTTP.
ssl.create_default_context = functools.cache(ssl.create_default_context)

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent
NUMBERS = itertools.count()  # of directories of tests
GIVEN_IN_FILES = ("slow", "attack")  # marks that a test has from its own file, by name, and from no conftest.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--summaries", default=None, help="JSON file that full and cuda runs add to: summaries, results by file"
    )
    parser.addoption(
        "--matrix", default=None, help="JSON file for the outcomes of test_parameter_matrix.py or test_model_matrix.py"
    )
    parser.addoption("--fuzz-cases", default=None, help="random requests, and frames, that a test sends")
    parser.addoption("--fuzz-seconds", default=None, help="for which the full fuzz goes on")
    parser.addoption("--cases", default="all", choices=["all", "worst"], help="attacks that are run")
    parser.addoption("--spinners", default=None, help="processes that keep cores busy beside attacks")
    parser.addoption("--seconds", default=None, help="of the soak")
    parser.addoption("--seed", default=0, help="of fuzzed cases and of the soak")
    parser.addoption("--heads", default=None, help="directory of heads trained for the default target, one folder each")


def pytest_configure(config: pytest.Config) -> None:
    """The process that hears of every test writes how each file's tests ended."""
    sys.dont_write_bytecode = False  # as above
    given = config.getoption("--summaries")
    if given is not None and not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to its controller
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        config.pluginmanager.register(FileResults(Path(given), device, torch.get_num_threads()))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Imports make a million objects that stay. The collector would walk through them again and again.

    It looks at new objects less often than Python has it, too: that is a fifteenth of a run's processor time.
    And libraries make 56 loggers apart, to each of which pytest would add its handlers, six times a test.
    Hypothesis would read the source of every module of the tree for constants to draw: 4 s of a quick run, which has no
    use for them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)
        gc.enable()
        for logger in list(logging.Logger.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.propagate = True
        drawing = sys.modules.get("hypothesis.internal.conjecture.providers")
        if drawing is not None and "not slow" in session.config.option.markexpr:
            vars(drawing)["_get_local_constants"] = lambda: drawing._local_constants


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `-m` leaves out as a whole is not even imported: half a run's processor time before its first test.

    That is tests/gpu, which its conftest.py marks `cuda`, and a file that never gives a mark that each test must have.
    """
    chosen = config.option.markexpr
    if collection_path == ROOT / "tests" / "gpu":
        return "not cuda" in chosen or None
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py") or not chosen:
        return None
    needed = [] if " or " in chosen else [term for term in chosen.split(" and ") if term in GIVEN_IN_FILES]
    text = collection_path.read_text() if needed else ""
    return any(f"mark.{mark}" not in text for mark in needed) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `slow_but_every(n)` the cases 0, n, 2n, .. are quick, and all others become `slow`.

    Of the slow cases of a test marked `full_but_every(n)`, likewise, all but those become `full`. Where a test has
    quick cases, which show the same of other values, n counts twice, and is 2 without the mark.
    """
    cases: Counter[str] = Counter()
    slow_cases: Counter[str] = Counter()
    for item in items:
        if (thinned := item.get_closest_marker("slow_but_every")) is not None:
            function = item.nodeid.partition("[")[0]
            if cases[function] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[function] += 1
        every = item.get_closest_marker("full_but_every") or (thinned and pytest.mark.full_but_every(2))
        if every and item.get_closest_marker("slow") is not None:
            function = item.nodeid.partition("[")[0]
            if slow_cases[function] % (every.args[0] * (2 if thinned else 1)):
                item.add_marker(pytest.mark.full)
            slow_cases[function] += 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Of a setup or teardown that passes a worker tells the process that counts tests nothing, nor when a test begins.

    A quick run spent a thirtieth of its processor time on six messages a test. With `--durations` or `--summaries`,
    which show the time of each phase, all are sent.
    """
    if worker is None or item.config.option.durations or item.config.option.summaries:
        return None
    for report in item.config.pluginmanager.getplugin("runner").runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test in which native code writes into Python's shared bytes fails by name, and no later one in its place.

    Commands that run in this process limit pytest's own handlers, which catch the lines of every later test: the limits
    end with the test. A hook, as a fixture of every test takes longer than most tests.
    """
    try:
        return (yield)
    finally:
        for handler in logging.getLogger().handlers:
            for limits in [found for found in handler.filters if isinstance(found, LineLimits)]:
                handler.removeFilter(limits)
        if found := damaged():
            mend(found)
            pytest.fail(f"something wrote into the shared bytes of the characters {found}: see support/shared_bytes.py")


@pytest.fixture(scope="session", autouse=True)
def _plain_answers_are_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Among the workers of one run, whose temporary directories have one parent."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        KEPT.directory = tmp_path_factory.getbasetemp().parent / "plain_answers"
        KEPT.directory.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def heads(request: pytest.FixtureRequest) -> Path:
    """The directory of trained heads; tests that need them are skipped without it."""
    given = request.config.getoption("--heads")
    if given is None:
        pytest.skip(
            "needs --heads DIR: only the EAGLE-3 head of the default model is shipped; the formats of the others are "
            "checked with random weights in every run"
        )
    return Path(given)


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    """Of the default model, found or downloaded once."""
    return resolve_model(EngineConfig())


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """Prompts, and the default model's tokens in transformers (tests/data/make_references.py)."""
    return json.loads((DATA / "greedy64.json").read_text())["rows"]


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Of a tiny tokenizer."""
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def no_collections() -> Iterator[None]:
    """For tests that time a turn: a collection of a whole run's garbage takes 110 ms, in whichever turn it falls."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shorter name than pytest's own.

    An engine puts sockets there, whose paths hold 107 bytes, and a worker of pytest-xdist adds a directory. It has a
    number of its own: pytest's would be looked for among all that there are, 2 ms where there are thousands.
    """
    name = re.sub(r"\W", "_", request.node.name.removeprefix("test_"))[:12]
    return tmp_path_factory.mktemp(f"{name}-{next(NUMBERS)}", numbered=False)


@pytest.fixture
def note_model(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, str, str], None]]:
    """Writes the outcome of a cell of the matrix of models: architecture, format, method. Nothing without --matrix."""
    from support.model_cells import MatrixFile

    given = request.config.getoption("--matrix")
    if given is None:
        yield lambda architecture, format_, method, outcome: None
        return
    file = MatrixFile(Path(given), request.node.path.relative_to(ROOT))
    yield file.note
    file.write()


@pytest.fixture
def record_summary(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Note what was seen under NAME; does nothing without --summaries."""
    import torch

    given = request.config.getoption("--summaries")

    def record(name: str, figures: dict[str, Any], device: str = "cpu") -> None:
        if given is not None:
            run = describe(device, torch.get_num_threads())
            summary = {"test": without_group(request.node.nodeid), "run": run, "figures": figures}
            update(Path(given), lambda all: all.update({name: summary}))

    return record
