"""SGLang's server test kits that import nothing of sglang, each against one server.

The kits are mixins of a test class with `base_url`, `process` and `model`; a kit is a file with such mixins. The
environment names the folder of kits and the server: KITS, BASE_URL, MODEL, TOKENIZER.
"""

import importlib.util
import inspect
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace

KITS = Path(os.environ["KITS"])
FOREIGN = ("from sglang", "import sglang")


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
            members = {
                "base_url": os.environ["BASE_URL"],
                "model": os.environ["MODEL"],
                "tokenizer_path": os.environ["TOKENIZER"],
                "process": SimpleNamespace(poll=lambda: None, pid=os.getpid()),
            }
            found[f"Test{name}"] = type(f"Test{name}", (mixin, unittest.TestCase), members)
    return found


for kit in sorted(KITS.glob("*_kit.py")):
    if alone(kit):
        globals().update(cases(load(kit)))
