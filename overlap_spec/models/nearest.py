"""Names the supported architecture that is nearest to an unknown one, and what it lacks, by keys of config.json."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from overlap_spec.errors import CheckpointError

ReadConfig = Callable[[Mapping[str, Any], str], object]

# Keys that change nothing of what is computed, whether a family reads them or not.
IDLE = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout"),
        *(
            "max_position_embeddings",
            "pretraining_tp",
            "cache_implementation",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
    )
)
OFF: tuple[object, ...] = (None, False, 0, 1, [], {})
MOST_KEYS = 4  # that are named
ORIGIN = "config.json"


class Recorder(Mapping[str, Any]):
    """A config that remembers which keys it was asked for by `get`; a copy of the whole asks for none."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self._values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def nearest(found: Sequence[str], readers: Mapping[str, ReadConfig], config: Mapping[str, Any]) -> str:
    """A clause of a sentence: the nearest architecture by name, and what of the config it does not compute."""
    name = max(readers, key=lambda known: max((_likeness(known, other) for other in found), default=0.0))
    read, refused = _read_by(readers[name], config)
    unread = [key for key, value in config.items() if key not in read | IDLE and (value is True or value not in OFF)]
    more = f" and {len(unread) - MOST_KEYS} more" if len(unread) > MOST_KEYS else ""
    keys = ", ".join(f"{key} {_shown(config[key])}" for key in unread[:MOST_KEYS])
    lacks = f", which does not read {keys}{more}" if unread else ""
    return f"the nearest one is {name}{lacks}" + (f"; of that one {', '.join(refused)}" if refused else "")


def _read_by(reader: ReadConfig, config: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """The keys that a reader asks for, and what it refuses: one after another, each without what was refused before."""
    read: set[str] = set()
    refused: list[str] = []
    for _ in config:
        recorder = Recorder(config)
        try:
            reader(recorder, ORIGIN)
            return read | recorder.read, refused
        except CheckpointError as error:
            sentence = str(error).removeprefix(f"{ORIGIN}: ")
        read |= recorder.read
        refused.append(sentence.partition(";")[0])
        if not (named := {key for key in config if key in sentence.split()}):
            break
        config = {key: value for key, value in config.items() if key not in named}
    return read, refused


def _likeness(known: str, other: str) -> float:
    return difflib.SequenceMatcher(None, known, other).ratio()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
