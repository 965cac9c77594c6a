"""Which clients share nothing that is cached, and what all of them share nevertheless."""

import secrets
from pathlib import Path

from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import ApiKeys, IsolationSettings
from overlap_spec.errors import ConfigError

MOST_BYTES = 1 << 20  # of --shared-prefix
FEW_NAMES = 8  # that a note lists
ALL_CLIENTS = "what concerns all clients (abort_all, flush_cache, /audit, /ui/live, /ui/timeline)"


def resolve_isolation(config: EngineConfig, keys: ApiKeys, notes: list[str]) -> tuple[IsolationSettings, ApiKeys]:
    """By default clients are isolated as soon as keys have two names. Raises: ConfigError naming the flag.

    What concerns all clients shows others' requests, and ends them: the operator alone may do it. Where none is
    named, the keys that are returned have one that only the engine's own processes know.
    """
    names = tuple(dict.fromkeys(keys.names.values()))
    isolates = len(names) > 1 if config.isolate_clients is None else config.isolate_clients
    if isolates and not names:
        raise ConfigError("isolate_clients", "tells clients apart by the names of their keys: give --api-key-file")
    if not isolates:
        if config.shared_prefix is not None:
            raise ConfigError("shared_prefix", "has no effect: clients are not isolated, so they share every prefix")
        if len(names) > 1:
            notes.append(f"{_listed(names)} are not isolated; they can find out what others have sent")
        return IsolationSettings(), keys
    if config.shared_prefix is None:
        shared, hint = "", "--shared-prefix FILE names a system prompt that all may share"
    else:
        shared, hint = _text_of(config), f"they share what begins as {config.shared_prefix}"
    notes.append(f"{_listed(names)} share no cached prefix (--no-isolate-clients lets them); {hint}")
    if config.speculative_ngram_external_corpus_path is not None:
        notes.append("isolated clients get no guesses from the corpus of n-grams (--no-isolate-clients lets them)")
    if keys.admin is None:
        notes.append(f"{ALL_CLIENTS} is refused to every client: --admin-api-key names an operator")
        keys = ApiKeys(keys.names, secrets.token_urlsafe())
    return IsolationSettings(names, shared), keys


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - FEW_NAMES
    return "clients " + ", ".join(names[:FEW_NAMES]) + (f" and {more} more" if more > 0 else "")


def _text_of(config: EngineConfig) -> str:
    assert config.shared_prefix is not None
    if config.skip_tokenizer_init:
        raise ConfigError("shared_prefix", "is a text, and with --skip-tokenizer-init there are token ids only")
    path = Path(config.shared_prefix).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode().removesuffix("\n")
    except OSError as error:
        raise ConfigError("shared_prefix", f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError("shared_prefix", f"{path} is not UTF-8") from None
    if len(content) > MOST_BYTES:
        raise ConfigError("shared_prefix", f"{path} has more than {MOST_BYTES} bytes")
    if not text:
        raise ConfigError("shared_prefix", f"{path} is empty")
    return text
