"""Features: what the engine does beyond requests, steps and drafts, one folder each.

A feature attaches to a process of the ring by a module of that process's name, and sends what it declares:

    <name>/frontend.py     attach(parts) -> RequestHook
    <name>/scheduler.py    attach(parts) -> SchedulerHook
    <name>/worker.py       attach(parts) -> StepHook
    <name>/__init__.py     EXTENSIONS: its messages, and the columns that it adds to those of the ring

A worker's module may list drafting METHODS, too.

`attach` returns None where the settings leave the feature out. The engine imports no feature: each process asks this
table once, at its start. A folder that is taken away is a feature that is not there; the engine runs without it.

Flags and fields of requests are public, so the configuration and `SamplingParams` have those of all features. Of a
feature that is not there a flag that is given is a ConfigError, and a field that is set a RequestError.

`--feature PACKAGE` attaches a package from outside in the same way, after these.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from overlap_spec.config import NGRAM, EngineConfig
from overlap_spec.config.flags import refuse_values, without_flags
from overlap_spec.errors import ConfigError
from overlap_spec.messages import EXTENSIONS, carrying

# In the order in which they attach, which is the order of their hooks.
NAMES = (
    *("thinking", "penalties", "grammar", "audit", "draft_health", "log_probs", "recovery", "tracing"),
    "isolation",
    "torch_compile",
    "adapt_draft",
    *("ngram", "adaptive_width"),  # the second one uses what the first one knows of tokens
    "expert_reads",
)
KINDS = FRONTEND, SCHEDULER, WORKER = "frontend", "scheduler", "worker"


class Owned(NamedTuple):
    """Flags of `EngineConfig`, each with the value that leaves the feature out, and fields of `SamplingParams`.

    `values`: of flags that are not the feature's, those that ask for it.
    """

    flags: Mapping[str, Any] = {}
    fields: tuple[str, ...] = ()
    values: Mapping[str, tuple[Any, ...]] = {}


OWNED = {
    "thinking": Owned({"reasoning_parser": "none"}, ("reasoning", "thinking")),
    "penalties": Owned(
        fields=(
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("logit_bias", "allowed_token_ids", "allowed_ids", "bad_words", "bad_word_ids"),
        )
    ),
    "grammar": Owned(fields=("grammar",)),
    "audit": Owned({"audit_rate": 0.0, "audit_action": "log", "audit_file": None}),
    "draft_health": Owned(),
    "log_probs": Owned(fields=("log_probs",)),
    "recovery": Owned({"recover": False, "max_recoveries": None}),
    "isolation": Owned({"isolate_clients": False, "shared_prefix": None}),
    "adapt_draft": Owned({"adapt_draft": False, "adapt_share": 0.05, "adapt_save": None}),
    "adaptive_width": Owned({"speculative_adaptive": False, "speculative_adaptive_config": None}),
    "ngram": Owned(
        dict.fromkeys(
            (
                "speculative_fuse_ngram",
                *(n for n in EngineConfig.__struct_fields__ if n.startswith("speculative_ngram_")),
            )
        ),
        values={"speculative_algorithm": (NGRAM,)},
    ),
    "expert_reads": Owned(),
    "torch_compile": Owned({"enable_torch_compile": False, "torch_compile_max_bs": None}),
    "tracing": Owned({"enable_trace": False, "otlp_traces_endpoint": None}),
}


def is_there(name: str) -> bool:
    """Returns True if the feature's folder exists."""
    return importlib.util.find_spec(f"{__name__}.{name}") is not None


def modules(kind: str, own: Sequence[str] = ()) -> list[ModuleType]:
    """The modules of this name of all features that are there, in the table's order, then those of `own` packages."""
    return [importlib.import_module(f"{place}.{kind}") for place in _places(own) if _has(place, kind)]


def listed(kind: str, name: str, own: Sequence[str] = ()) -> list[Any]:
    """What the modules of this kind list by this name, in the table's order; those of `own` packages last."""
    return [each for module in modules(kind, own) for each in getattr(module, name, ())]


def given(kind: str, name: str, own: Sequence[str], *arguments: Any) -> Any:
    """What the one feature gives whose module has this function, and returns something there; None: none does."""
    found = [getattr(module, name)(*arguments) for module in modules(kind, own) if hasattr(module, name)]
    found = [each for each in found if each is not None]
    assert len(found) <= 1, f"one feature can give its own {name}"
    return found[0] if found else None


def _places(own: Sequence[str]) -> list[str]:
    return [*(f"{__name__}.{name}" for name in NAMES if is_there(name)), *own]


def _has(place: str, kind: str) -> bool:
    return importlib.util.find_spec(f"{place}.{kind}") is not None


def check_own(own: Sequence[str]) -> None:
    """Raises: ConfigError naming a package of one's own that cannot attach."""
    for place in own:
        try:
            attaches = any(_has(place, kind) for kind in KINDS)
        except (ImportError, ValueError) as error:
            text = f"cannot import {place!r} ({error}): put its directory in PYTHONPATH"
            raise ConfigError("feature", text) from None
        if not attaches:
            wanted = ", ".join(f"{kind}.py" for kind in KINDS)
            raise ConfigError("feature", f"{place!r} has none of {wanted}, by which it would attach")
        if place.rpartition(".")[2] in NAMES or list(own).count(place) > 1:
            raise ConfigError("feature", f"{place!r} is the name of a feature that is attached already")


def name_of(module: ModuleType) -> str:
    """The feature that a module is of."""
    return module.__name__.split(".")[-2]


def link(union: Any, own: Sequence[str] = ()) -> Any:
    """The type of a link's decoder, which knows what the features send, those of `own` packages too."""
    sent = (getattr(importlib.import_module(place), "EXTENSIONS", ()) for place in _places(own))
    return carrying(union, (*EXTENSIONS, *itertools.chain.from_iterable(sent)))


def absent() -> list[str]:
    """The features whose folders are not there."""
    return [name for name in NAMES if not is_there(name)]


def absent_fields() -> dict[str, str]:
    """Fields of requests that are refused, with the feature that each is of."""
    return {field: name for name in absent() for field in OWNED.get(name, Owned()).fields}


def without_absent(config: EngineConfig) -> EngineConfig:
    """The same without the features that are not there.

    Raises: ConfigError naming a flag of one that is given, or a package of one's own that cannot attach.
    """
    check_own(config.feature or ())
    owned = {name: OWNED.get(name, Owned()) for name in absent()}
    for name, of_feature in owned.items():
        refuse_values(config, of_feature.values, f"feature {name!r}")
    return without_flags(config, {name: of_feature.flags for name, of_feature in owned.items()}, "feature")
