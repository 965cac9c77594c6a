"""A serving benchmark that is a part of an engine, run from the Python files of the engine's wheel.

    python engine_bench.py FOLDER sglang|vllm ARGUMENTS..

The benchmark's own files run as they are. The engine that they belong to is not installed: `REAL` names what is
imported from FOLDER, and every other module of the engine is a stand-in, with the few values of `VALUES`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

REAL = {  # packages and modules, with all that is in them
    "sglang": ("sglang.benchmark", "sglang.srt.utils.network"),
    "vllm": ("vllm.benchmarks",),
}


class StandIn(ModuleType):
    """A module that has every name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return VALUES.get(f"{self.__name__}.{name}") or MagicMock(name=name)


class StandIns(MetaPathFinder, Loader):
    """Imports stand-ins for modules of `engine` that are not `REAL`; packages of real ones run no `__init__`."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._folder = folder
        self._engine = engine

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] != self._engine or any(f"{name}.".startswith(f"{real}.") for real in REAL[self._engine]):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = [str(self._folder.joinpath(*module.__name__.split(".")))]


def tokenizer(name: str, *_: object, **__: object) -> Any:
    """What vLLM loads tokenizers with, in the end."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


VALUES: dict[str, Any] = {
    "sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST": "2.2.2.2",
    "vllm.tokenizers.get_tokenizer": tokenizer,
    "vllm.utils.argparse_utils.FlexibleArgumentParser": argparse.ArgumentParser,
    "vllm.utils.mistral.is_mistral_tokenizer": lambda _: False,
}


def main(folder: str, engine: str, *arguments: str) -> None:
    """Run the benchmark."""
    sys.meta_path.insert(0, StandIns(Path(folder), engine))
    sys.argv = [f"{engine} benchmark", *arguments]
    if engine == "sglang":
        importlib.import_module("sglang.benchmark.serving").cli_main()
        return
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
