"""`--feature PACKAGE`: a package from outside attaches as the engine's own features do."""

import importlib
from pathlib import Path

import msgspec
import pytest

from overlap_spec import features
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.errors import ConfigError
from overlap_spec.features import check_own, without_absent
from overlap_spec.messages import ToScheduler

MESSAGES = """
from overlap_spec.messages import Extension

class Noted(Extension, frozen=True):
    text: str

EXTENSIONS = (Noted,)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that attaches to the scheduler and has a message."""
    folder = tmp_path / "noted_feature"
    folder.mkdir()
    (folder / "scheduler.py").write_text("def attach(parts):\n    return None\n")
    (folder / "__init__.py").write_text(MESSAGES)
    (tmp_path / "empty_feature").mkdir()
    (tmp_path / "grammar").mkdir()
    (tmp_path / "grammar" / "worker.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "noted_feature"


def test_it_attaches_after_the_engines_own(package: str) -> None:
    check_own([package])
    own, with_it = features.modules(features.SCHEDULER), features.modules(features.SCHEDULER, [package])
    assert with_it[:-1] == own
    assert features.name_of(with_it[-1]) == package
    assert features.modules(features.WORKER, [package]) == features.modules(features.WORKER)


def test_it_may_give_what_takes_the_place_of_the_engines_own(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.given(features.SCHEDULER, "answer", [package], 6) is None
    module = features.modules(features.SCHEDULER, [package])[-1]
    monkeypatch.setattr(module, "answer", lambda number: number * 7 or None, raising=False)
    assert features.given(features.SCHEDULER, "answer", [package], 0) is None
    assert features.given(features.SCHEDULER, "answer", [package], 6) == 42


def test_two_cannot_take_the_same_place(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in features.modules(features.SCHEDULER, [package])[-2:]:
        monkeypatch.setattr(module, "answer", lambda: 42, raising=False)
    with pytest.raises(AssertionError, match="one feature can give its own answer"):
        features.given(features.SCHEDULER, "answer", [package])


def test_its_messages_pass_the_links(package: str) -> None:
    (kind,) = importlib.import_module(package).EXTENSIONS
    sent = msgspec.msgpack.encode(kind("hello"))
    assert msgspec.msgpack.Decoder(features.link(ToScheduler, [package])).decode(sent) == kind("hello")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(features.link(ToScheduler)).decode(sent)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (["no_such_package"], "cannot import 'no_such_package'.*PYTHONPATH"),
        (["empty_feature"], "has none of frontend.py, scheduler.py, worker.py"),
        (["grammar"], "attached already"),
        (["noted_feature", "noted_feature"], "attached already"),
    ],
)
def test_what_cannot_attach_is_refused(own: list[str], words: str, package: str) -> None:
    with pytest.raises(ConfigError, match=f"feature.*{words}"):
        check_own(own)
    with pytest.raises(ConfigError, match=f"feature.*{words}"):
        without_absent(EngineConfig(feature=tuple(own)))  # which every command asks


def test_the_flag_takes_packages() -> None:
    assert config_from({"feature": ("a", "b.c")}) == EngineConfig(feature=("a", "b.c"))
    with pytest.raises(ConfigError, match="feature"):
        config_from({"feature": ("a:b",)})
