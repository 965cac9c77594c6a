"""Fetches repositories of the Hugging Face hub into local directories.

A model that is complete in the cache needs no network. Otherwise huggingface_hub downloads it, and respects
HF_HUB_OFFLINE, HF_HOME and tokens.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from overlap_spec.errors import ConfigError

Progress = Callable[[str, int, int], None]  # what, done, total; 0: the total is unknown


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


def reporting_tqdm(what: str, progress: Progress) -> type[Any]:
    """A tqdm that calls `progress` instead of drawing, for libraries that only support tqdm."""

    class ReportingTqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.total:
                progress(f"{what}: {self.desc.rstrip(': ')}" if self.desc else what, int(self.n), int(self.total))

        def clear(self, nolock: bool = False) -> None:
            return

    return ReportingTqdm


_METADATA = ("*.json", "*.jinja")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # in order of preference
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_hub_id(name: str) -> bool:
    """Whether the name is `owner/name` or `name`, and not a path."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def is_cached(repo_id: str, revision: str | None = None) -> bool:
    """Whether a repository was downloaded before, with its weights."""
    cached = _cached(repo_id, revision)
    return cached is not None and _has_weights(cached)


def fetch_repository(field: str, repo_id: str, progress: Progress, revision: str | None = None) -> Path:
    """A directory with config.json and one format of weights. `revision`: branch, tag or commit; None: main.

    Raises: ConfigError naming `field` if the repository is neither cached nor reachable.
    """
    cached = _cached(repo_id, revision)
    if cached is not None and _has_weights(cached):
        return cached
    for pattern in _WEIGHTS:
        directory = _download(field, repo_id, (*_METADATA, pattern), progress, revision)
        if _has_weights(directory):
            return directory
    raise ConfigError(field, f"{repo_id} on the hub has no config.json with {' or '.join(_WEIGHTS)}")


def fetch_tokenizer(field: str, repo_id: str, progress: Progress) -> Path:
    """A directory with tokenizer.json. Raises: ConfigError naming `field`."""
    return _fetch_metadata(field, repo_id, "tokenizer.json", progress)


def fetch_config(field: str, repo_id: str, progress: Progress, revision: str | None = None) -> Path:
    """A directory with config.json, weights or not. Raises: ConfigError naming `field`."""
    return _fetch_metadata(field, repo_id, "config.json", progress, revision)


def fetch_file(field: str, repo_id: str, file: str, progress: Progress) -> Path:
    """One file of a repository. Raises: ConfigError naming `field` if it is neither cached nor reachable."""
    cached = _cached(repo_id)
    if cached is not None and (cached / file).is_file():
        return cached / file
    path = _download(field, repo_id, (file,), progress) / file
    if not path.is_file():
        raise ConfigError(field, f"{repo_id} on the hub has no file {file}")
    return path


def _fetch_metadata(field: str, repo_id: str, wanted: str, progress: Progress, revision: str | None = None) -> Path:
    cached = _cached(repo_id, revision)
    if cached is not None and (cached / wanted).is_file():
        return cached
    return _download(field, repo_id, _METADATA, progress, revision)


def _cached(repo_id: str, revision: str | None = None) -> Path | None:
    """The newest downloaded snapshot. It may lack files; the caller checks."""
    from huggingface_hub import snapshot_download  # slow to import, and only hub ids need it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns="config.json"))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _download(
    field: str, repo_id: str, patterns: tuple[str, ...], progress: Progress, revision: str | None = None
) -> Path:
    from httpx import HTTPError  # the HTTP client of huggingface_hub
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    bars = reporting_tqdm(repo_id, progress)
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), tqdm_class=bars))
    except (HFValidationError, HTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            field, f"{repo_id} is no local path, is not in the hub cache and could not be fetched: {reason}"
        ) from error


def _has_weights(directory: Path) -> bool:
    """True if config.json and every file of one weight format is there."""
    if not (directory / "config.json").is_file():
        return False
    for index in directory.glob("*.index.json"):
        shards = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if shards and all((directory / shard).is_file() for shard in shards):
            return True
    return any((directory / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
