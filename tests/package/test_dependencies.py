"""What the package imports is what pyproject.toml declares, and each of those has a tested version.

An environment for tests cannot show this: its other packages bring packages along that are not declared.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.pinned_versions import CUDA, TESTED, pins_of

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("overlap_spec", "kernels/overlap_spec_kernels")
OURS = {"overlap_spec", "overlap_spec_kernels"}
DISTRIBUTIONS = {  # where the import has another name; of packages that share one, by module
    **{"cuda": "cuda-bindings", "zmq": "pyzmq", "opentelemetry": "opentelemetry-api"},
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
COMES_WITH_TORCH = {"cuda-bindings", "nvidia-cuda-nvrtc"}  # in the version that a PyTorch for CUDA asks for

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Import:
    """One import statement of a distribution. `lazy`: only a call of a function, or a type checker, executes it."""

    distribution: str
    where: str
    lazy: bool


def names_in(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def imports_in(tree: ast.AST, file: str, lazy: bool = False) -> Iterator[Import]:
    """All imports of other people's packages below a node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # has no statement
            continue
        for module in modules_of(node):
            if module.split(".")[0] not in OURS | sys.stdlib_module_names:
                yield Import(distribution_of(module), f"{file}:{getattr(node, 'lineno', 0)}", lazy)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_type_checkers(node)
        yield from imports_in(node, file, lazy or inside)


def distribution_of(module: str) -> str:
    """The longest beginning of the module's name that is listed, or else its first part."""
    parts = module.split(".")
    beginnings = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    listed = (DISTRIBUTIONS[name] for name in beginnings if name in DISTRIBUTIONS)
    return next(listed, parts[0].replace("_", "-").lower())


def modules_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
    return []


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    files = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    return [
        found for path in files for found in imports_in(ast.parse(path.read_text()), path.relative_to(ROOT).as_posix())
    ]


REQUIRED = names_in(PROJECT["project"]["dependencies"])
EXTRAS = {name: names_in(extra) for name, extra in PROJECT["project"]["optional-dependencies"].items()}
OPTIONAL = set.union(*EXTRAS.values()) | {"transformers"}  # a baseline's, group bench
ROOMS = {
    "overlap_spec/entrypoints/ray/": "ray",
    "overlap_spec/entrypoints/otlp/": "otlp",
}  # folder -> the extra without which nothing imports its modules
GROUPS = {name: names_in(group) for name, group in PROJECT["dependency-groups"].items()}


@pytest.mark.slow
def test_every_import_is_declared(imports: list[Import]) -> None:
    assert not [found for found in imports if found.distribution not in REQUIRED | OPTIONAL]


@pytest.mark.slow
def test_what_is_optional_is_imported_where_it_is_used(imports: list[Import]) -> None:
    at_once = [found for found in imports if not found.lazy and found.distribution not in REQUIRED]
    assert not [found for found in at_once if found.distribution not in extras_of_room(found.where)]


def extras_of_room(where: str) -> set[str]:
    return set().union(*(EXTRAS[extra] for folder, extra in ROOMS.items() if where.startswith(folder)))


@pytest.mark.slow
def test_what_is_declared_is_imported(imports: list[Import]) -> None:
    assert {found.distribution for found in imports} == REQUIRED | OPTIONAL
    assert "transformers" in GROUPS["bench"] and not REQUIRED & OPTIONAL


def test_what_is_declared_has_a_tested_version() -> None:
    declared = REQUIRED | OPTIONAL | set.union(*GROUPS.values())
    assert declared == set(pins_of(TESTED))
    assert declared - COMES_WITH_TORCH == set(pins_of(CUDA))


def test_how_imports_are_found() -> None:
    text = """
import os, rich.table
from zmq.asyncio import Context
from . import sibling
from overlap_spec import Engine
from opentelemetry.sdk.trace import Span
if TYPE_CHECKING:
    import triton
else:
    import numpy
if TYPE_CHECKING:
    import triton.language
class Class:
    from Prometheus_Client import Counter
    async def method(self):
        with self:
            from cuda.bindings import driver
try:
    import httpx
except ImportError:
    httpx = None
"""
    found = [(found.distribution, found.where, found.lazy) for found in imports_in(ast.parse(text), "f")]
    assert found == [
        ("rich", "f:2", False),
        ("pyzmq", "f:3", False),
        ("opentelemetry-sdk", "f:6", False),
        ("triton", "f:8", False),
        ("numpy", "f:10", False),
        ("triton", "f:12", True),
        ("prometheus-client", "f:14", False),
        ("cuda-bindings", "f:17", True),
        ("httpx", "f:19", False),
    ]
