"""SGLang's server test kits that import nothing of sglang, each against one server.

The kits are mixins of a test class with `base_url`, `process` and `model`; a kit is a file with such mixins. The
environment names the folder of kits and the server: KITS, BASE_URL, MODEL, TOKENIZER.

The kit of the Messages API imports two classes of sglang for one of its tests, which does not use the server; it is
loaded with modules that lack them.
"""

import importlib.util
import inspect
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import openai
import requests

KITS, BASE_URL, MODEL = Path(os.environ["KITS"]), os.environ["BASE_URL"], os.environ["MODEL"]
FOREIGN = ("from sglang", "import sglang")
MESSAGES_KIT = "anthropic_messages_kit"
LACKING = ("sglang", *(f"sglang.srt.entrypoints.anthropic.{name}" for name in ("protocol", "serving")))


def flush_cache() -> None:
    """What a server's test class has for kits of its prefix cache."""
    requests.post(f"{BASE_URL}/flush_cache", params={"timeout": 30}).raise_for_status()


MEMBERS = {  # of the test class that mixes a kit in
    "base_url": BASE_URL,
    "model": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": os.environ["TOKENIZER"],
    "api_key": "none",
    "client": openai.Client(api_key="none", base_url=f"{BASE_URL}/v1"),
    "process": SimpleNamespace(poll=lambda: None, pid=os.getpid()),
    "flush_cache": staticmethod(flush_cache),
    "cache_chunk_size": 64,
    # lengths for a context of 8,192 tokens and a processor
    "abort_all_max_new_tokens": 1000,
    "waiting_timeout_max_new_tokens": 64,
    "running_timeout_max_new_tokens": 64,
    "pause_max_new_tokens": 64,
}


def alone(path: Path) -> bool:
    """Does it import nothing of sglang?"""
    return not any(line.strip().startswith(FOREIGN) for line in path.read_text().splitlines())


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def cases(module: ModuleType) -> dict[str, type[unittest.TestCase]]:
    """A test class for each mixin of a module that has tests of its own."""
    found = {}
    for name, mixin in inspect.getmembers(module, inspect.isclass):
        own = mixin.__module__ == module.__name__ and not issubclass(mixin, unittest.TestCase)
        if own and any(each.startswith("test") for each in dir(mixin)):
            found[f"Test{name}"] = type(f"Test{name}", (mixin, unittest.TestCase), MEMBERS)
    return found


sys.modules.update({name: MagicMock() for name in LACKING})
for kit in sorted(KITS.glob("*_kit.py")):
    if alone(kit) or kit.stem == MESSAGES_KIT:
        globals().update(cases(load(kit)))
