"""API keys from a flag, the environment and a file; and that nothing shows one."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_spec.config import ApiKeys, EngineConfig, Machine, ModelFiles, child_environment
from overlap_spec.config.keys import read_keys
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OVERLAP_SPEC_API_KEY", "OVERLAP_SPEC_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def keys_of(tmp_path: Path, text: str | None = None, **flags: Any) -> ApiKeys:
    if text is not None:
        (tmp_path / "keys").write_text(text)
        flags["api_key_file"] = str(tmp_path / "keys")
    return read_keys(EngineConfig(**flags))


def test_keys_of_a_flag_and_a_file(tmp_path: Path) -> None:
    text = "# ours\n\nalice:sk-1\n alice : sk-2 \nsk-3\nbob:sk:with:colons\n"
    keys = keys_of(tmp_path, text, api_key="sk-0", admin_api_key="sk-9")
    assert keys.names == {
        "sk-0": "default",
        "sk-1": "alice",
        "sk-2": "alice",
        "sk-3": "line 5",
        "sk:with:colons": "bob",
    }
    assert (keys.admin, keys.first) == ("sk-9", "sk-9")
    assert "sk-" not in repr(keys)
    assert keys_of(tmp_path) == ApiKeys() and ApiKeys().first is None


def test_keys_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_API_KEY", "sk-e")
    monkeypatch.setenv("OVERLAP_SPEC_ADMIN_API_KEY", "sk-a")
    assert keys_of(tmp_path) == ApiKeys({"sk-e": "default"}, "sk-a")
    assert keys_of(tmp_path, api_key="sk-f").names == {"sk-f": "default"}, "the flag goes first"


def test_a_key_is_what_a_client_can_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that was made of a file ends with the file's end of line; an editor may begin a file with a mark."""
    monkeypatch.setenv("OVERLAP_SPEC_API_KEY", "sk-e\n")
    monkeypatch.setenv("OVERLAP_SPEC_ADMIN_API_KEY", " sk-a\r\n")
    assert keys_of(tmp_path) == ApiKeys({"sk-e": "default"}, "sk-a")
    assert keys_of(tmp_path, "\ufeffsk-1\n", api_key="sk f ").names == {"sk f": "default", "sk-1": "line 1"}
    for bad in (" ", "\n", "sk-1\nsk-2"):
        with pytest.raises(ConfigError, match="--api-key: is blank or has control characters"):
            keys_of(tmp_path, api_key=bad)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("\n# none\n", {}, "has no key"),
        ("alice:\n", {}, "line 1 must be KEY or NAME:KEY"),
        (":sk-1\n", {}, "line 1 must be KEY or NAME:KEY"),
        ("a:sk-1\nb:sk-1\n", {}, "line 2 has a key that was given before"),
        ("sk-1", {"api_key": "sk-1"}, "line 1 has a key that was given before"),
        ("sk-1", {"admin_api_key": "sk-1"}, "--admin-api-key: is also one of the API keys"),
        ("a" * 129 + ":sk-1", {}, "--api-key-file: a name of a key has at most 128 characters"),
        ("line 7:sk-1", {}, "line 1: the name 'line 7' is that of a key without one"),
        ("default:sk-1", {}, "line 1: the name 'default' is that of a key without one"),
        ("a\0b:sk-1", {}, "has control characters"),
        ("admin:sk-1", {}, "--api-key-file: the name 'admin' is the operator's"),
    ],
)
def test_a_wrong_file_is_told_by_line_without_its_keys(
    text: str, flags: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        keys_of(tmp_path, text, **flags)
    assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_a_file_that_every_user_can_read_is_warned_about(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("alice:sk-1")
    (tmp_path / "keys").chmod(mode)
    assert read_keys(EngineConfig(api_key_file=str(tmp_path / "keys"))).names
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"--api-key-file: every user of this machine can read {tmp_path}/keys, its mode is {mode:04o}: chmod o-r"
    assert said == [text] * warned


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file: .*nowhere cannot be read: No such file"):
        read_keys(EngineConfig(api_key_file=str(tmp_path / "nowhere")))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00sk")
    with pytest.raises(ConfigError, match="it is no text"):
        read_keys(EngineConfig(api_key_file=str(tmp_path / "bytes")))


def test_no_report_and_no_child_process_environment_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_API_KEY", "sk-env")
    monkeypatch.setenv("OVERLAP_SPEC_ADMIN_API_KEY", "sk-operator")
    (tmp_path / "keys").write_text("alice:sk-alice")
    config = EngineConfig(api_key_file=str(tmp_path / "keys"))
    for each in (config, EngineConfig(api_key="sk-flag", admin_api_key="sk-flag-too")):
        files = ModelFiles(weights="", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=64, vocab_size=9)
        settings = resolve(each, files, Machine(2, False), read_keys(each))[0]
        assert settings.link.api_key is not None and settings.server.keys.names
        assert "sk-" not in str(settled_flags(each, settings)) and "sk-" not in str(settings.server.keys)
        for role in ("worker", "scheduler", "frontend"):
            assert "sk-" not in str(child_environment(settings, role).values())


def test_keys_travel_to_the_processes(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "alice:sk-1\nsk-2")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(keys), type=ApiKeys) == keys
