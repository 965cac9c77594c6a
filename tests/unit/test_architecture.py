"""Rules of the tree, read from its syntax: who imports whom, what the step path may not call, sizes, docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "overlap_spec"
KERNELS = ROOT / "kernels" / "overlap_spec_kernels"
FILES = sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 75  # its arguments alone may be ten

# imported by everybody but the kernels
COMMON = {"errors", "config", "config_speculation", "draft_kind", "messages", "version", "json_file", "weight_files"}
LINKS = {"tracing", "transport", "step_link", "actor", "client", "client_calls", "client_link"}
TOP = {
    "engine",
    "supervisor",
    "processes",
    "run_directory",
    "threads",
    "config_fields",
    "resolve",
    "resolve_attention",
    "resolve_multi_layer",
    "resolve_ngram",
    "resolve_numbers",
    "resolve_speculation",
    "width_rules",
    "hub",
    "machine",
    "measured",
    "waiting",
    "wake_probe",
}

# Part of the package -> parts it may import, beside itself and COMMON. A part is a module or a subpackage.
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(("draft_kind", "errors", "version"), set()),
    **dict.fromkeys(("json_file", "weight_files"), {"errors"}),
    **dict.fromkeys(
        (
            "config",
            "config_speculation",
            "messages",
            "config_fields",
            "width_rules",
            "threads",
            "machine",
            "hub",
            "tracing",
        ),
        COMMON,
    ),
    "measured": COMMON | {"machine"},
    "waiting": COMMON | {"measured"},
    "wake_probe": set(),
    "resolve": COMMON | {"resolve_attention", "resolve_ngram", "resolve_speculation"},
    "resolve_speculation": COMMON | {"resolve_multi_layer", "resolve_ngram", "resolve_numbers", "width_rules"},
    **dict.fromkeys(("resolve_multi_layer", "resolve_ngram"), COMMON | {"resolve_numbers"}),
    **dict.fromkeys(("resolve_attention", "resolve_numbers"), COMMON),
    **dict.fromkeys(("transport", "step_link", "actor", "client", "client_calls", "client_link"), LINKS),
    **dict.fromkeys(("engine", "supervisor", "processes", "run_directory"), LINKS | TOP),
    "cli": LINKS | TOP | {"server", "bench", "metrics"},
    "server": {"client", "client_calls", "client_link", "metrics"},
    "tokenizer": LINKS,
    "scheduler": {"tracing", "transport", "step_link", "actor", "metrics"},
    "metrics": set(),
    "bench": LINKS | TOP | {"server"},
    "models": {"spec.types"},
    "spec": {"models.interfaces", "models.work"},
    "worker": {"tracing", "transport", "step_link", "actor", "models", "spec", "hub", "metrics", "measured", "machine"},
    "": LINKS | TOP,  # overlap_spec/__init__.py
    "__main__": {"cli"},
}
ALSO = {  # one file's own exceptions
    "bench/workload.py": {"tokenizer.codec"},  # makes token ids for an engine that has no tokenizer
    "bench/scheduler.py": {"scheduler"},  # measures the scheduler by itself, against a fake worker
    "spec/ngram_draft.py": {"models.kv_cache"},  # brings no cache, and must say so
    # the table of methods says how each is loaded
    "spec/methods.py": {
        "models.attention_choice",
        "models.kv_cache",
        "models.language_draft",
        "models.loader",
        "models.mtp_layers",
    },
}
WITHOUT_LINKS = {"models", "spec"}  # tensors in, tensors out
# Part -> top-level packages outside the project that it never imports.
NEVER: dict[str, set[str]] = {
    **dict.fromkeys(COMMON | LINKS | TOP | {"cli", "server", "metrics", ""}, {"torch", "triton"}),
    "tokenizer": {"torch", "triton", "transformers"},
    "scheduler": {"torch", "triton", "numpy"},
    "models": {"zmq", "transformers"},
    "spec": {"zmq", "transformers"},
    "worker": {"transformers"},
}
METHODS = {"EAGLE", "EAGLE2", "EAGLE3", "MTP", "NEXTN", "STANDALONE", "NGRAM", "NONE"}
METHODS_NAMED_IN = {"config.py", "config_speculation.py", "spec/methods.py"}

STEP_PATH_FOLDERS = ("spec", "models")
OFF_STEP_PATH = {  # run once, at load or at start
    "models/loader.py",
    "models/weights.py",
    "models/checkpoint.py",
    "models/gguf.py",
    "models/registry.py",
    "spec/methods.py",
}
STEP_PATH_OF_WORKER = {
    f"worker/{name}.py"
    for name in ("chunks", "decode", "devices", "executor", "handle", "loop", "packing", "prefill", "slots", "windows")
}
SYNCHRONIZING = {"item", "tolist", "cpu", "synchronize", "nonzero"}
HOST_SIDE = {  # functions of those files for a result that is out, for a ring too small, or for the end of the run
    ("worker/devices.py", "finish"),
    ("worker/devices.py", "rows"),
    ("worker/devices.py", "upload"),
}


def name_of(path: Path) -> str:
    """Its place below overlap_spec/, or below kernels/ for a kernel."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT / "kernels").as_posix()


def part_of(name: str) -> str:
    first = name.split("/")[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module that is imported, wherever, with its line; what only type checkers import counts too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            if module in ("overlap_spec", "overlap_spec.models", "overlap_spec.spec"):
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def is_allowed(imported: str, part: str, allowed: set[str]) -> bool:
    inside = imported.removeprefix("overlap_spec").removeprefix(".")
    first = inside.split(".")[0]
    return first == part or any(inside == other or inside.startswith(f"{other}.") for other in allowed | COMMON)


every_file = pytest.mark.parametrize("path", FILES, ids=name_of)
every_own_file = pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(PACKAGE)], ids=name_of)


@every_own_file
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(name_of(path))
    assert part in MAY_IMPORT, f"{part}: say in MAY_IMPORT what it may import"
    for imported, line in imports_of(tree_of(path)):
        where = f"{path.relative_to(ROOT)}:{line} imports {imported}"
        if imported.split(".")[0] == "overlap_spec" and part != "":
            assert is_allowed(imported, part, MAY_IMPORT[part] | ALSO.get(name_of(path), set())), where
            inside = part == "messages" or not imported.startswith("overlap_spec.messages.")
            assert inside, f"{where}: import the package"
            assert part not in WITHOUT_LINKS or imported != "overlap_spec.messages", where
        assert imported.split(".")[0] not in NEVER.get(part, set()), where


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=name_of)
def test_kernels_know_nothing_of_the_project(path: Path) -> None:
    for imported, line in imports_of(tree_of(path)):
        assert imported.split(".")[0] != "overlap_spec", f"{path.name}:{line} imports {imported}"


def test_the_folder_kernels_cannot_be_imported() -> None:
    """`kernels` is a package on PyPI that transformers looks for; ours would be taken for it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@every_file
def test_no_globals_and_one_reader_of_the_environment(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno} declares a global"
        if name_of(path) != "config.py" and isinstance(node, ast.Attribute):
            read = node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name) and node.value.id == "os"
            assert not read, f"{path.name}:{node.lineno} reads the environment; config.py does"


@every_file
def test_only_one_file_knows_the_names_of_methods(path: Path) -> None:
    if name_of(path) in METHODS_NAMED_IN:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant):
            assert node.value not in METHODS, f"{path.name}:{node.lineno} names the method {node.value}"


def is_on_step_path(path: Path) -> bool:
    name = name_of(path)
    return (name.split("/")[0] in STEP_PATH_FOLDERS and name not in OFF_STEP_PATH) or name in STEP_PATH_OF_WORKER


def calls_in(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Every method call below a node, with the name of the function it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield function, child
        yield from calls_in(
            child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        )


@pytest.mark.parametrize("path", [path for path in FILES if is_on_step_path(path)], ids=name_of)
def test_the_step_path_never_waits_for_the_device(path: Path) -> None:
    for function, call in calls_in(tree_of(path), ""):
        assert isinstance(call.func, ast.Attribute)
        if (name_of(path), function) not in HOST_SIDE:
            called = call.func.attr
            assert called not in SYNCHRONIZING, f"{path.relative_to(ROOT)}:{call.lineno} calls .{called}()"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    return bool(names & {"TritonKernel", "GluonKernel"})


@every_file
def test_files_and_functions_are_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{path.name} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            most = MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES
            assert length <= most, f"{path.name}:{node.lineno} {node.name} has {length} lines"


def is_public(name: str) -> bool:
    """A kernel's torch twin has its op's description."""
    return not name.startswith("_") and not name.endswith("_reference")


@every_file
def test_modules_classes_and_public_functions_say_what_they_are(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path.relative_to(ROOT)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name):
            assert ast.get_docstring(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has no docstring"


def test_the_rules_look_at_something() -> None:
    """A moved folder must not turn these tests into tests of nothing."""
    assert len(FILES) > 20
    assert any(is_on_step_path(path) for path in FILES)
