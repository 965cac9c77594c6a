"""The proof that an entry point can be taken away: its folder is hidden; the others answer, and refuse it by name."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_without_features import answers

from overlap_spec import entrypoints
from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints import NAMES, NEEDS, PATHS, SERVER, absent, is_there, without_absent
from overlap_spec.entrypoints.cli import main
from overlap_spec.errors import ConfigError

BESIDE_SERVER = [name for name in NAMES if name not in (*SERVER, "cli")]
GONE = "is of the entry point {!r}, which is not part of this installation"


def check(*hidden: str) -> None:
    whole, without = answers(), answers(*(f"entrypoints/{name}" for name in hidden))
    for name in ("completion", "chat"):
        assert without[name] == whole[name] != ""
    for name, paths in PATHS.items():
        for path in paths:
            assert (GONE.format(name) in without[path]) == (name in hidden), without[path]
            assert "entry point" not in whole[path]


def test_a_server_without_other_entry_points_answers_as_one_with_all() -> None:
    check(*BESIDE_SERVER)


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("folder", BESIDE_SERVER)
def test_a_server_without_one_entry_point_answers_as_one_with_all(folder: str) -> None:
    check(folder)


@contextmanager
def gone(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """The folders of these entry points cannot be found."""
    known = importlib.util.find_spec
    hidden = {f"{entrypoints.__name__}.{name}" for name in names}
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else known(name))
        yield


def test_what_needs_a_folder_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert absent() == []
    for name in NAMES:
        with gone(monkeypatch, name):
            assert set(absent()) == {other for other in NAMES if name in (other, *NEEDS[other])}


def test_commands_go_with_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with gone(monkeypatch, "cli"):
        assert absent() == ["cli", "top", "ray"]


def test_a_flag_of_what_is_gone_is_refused_and_otherwise_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(http_header_timeout=5.0)
    assert without_absent(config) is config
    with gone(monkeypatch, "ui"):
        assert without_absent(config).disable_ui
        assert without_absent(config).http_header_timeout == 5.0
    with gone(monkeypatch, "otlp"), pytest.raises(ConfigError, match="enable-trace"):
        without_absent(EngineConfig(enable_trace=True))
    with gone(monkeypatch, "protection"), pytest.raises(ConfigError, match=r"http-header-timeout.*'protection'"):
        without_absent(config)


@pytest.mark.parametrize(("command", "owner"), [("top", "top"), ("serve-ray", "ray"), ("verify", "native")])
def test_a_command_of_what_is_gone_is_refused_by_name(
    command: str, owner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_there(owner)
    with gone(monkeypatch, owner):
        assert main([command]) == 2
    assert f"{command} {GONE.format(owner)}" in capsys.readouterr().err
