"""Rules of the tree, read from its syntax: who imports whom, what the step path may not call, sizes, docstrings."""

import ast
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from overlap_spec import entrypoints, features
from overlap_spec.config.speculation import METHOD_FACTS
from overlap_spec.messages import StepPlan
from overlap_spec.speculative.methods import METHODS as METHOD_RECORDS

ROOT = Path(__file__).parents[2]
TOP = ("overlap_spec", "kernels", "tests", "benchmarks", "examples")
PACKAGE = ROOT / "overlap_spec"
KERNELS = ROOT / "kernels" / "overlap_spec_kernels"
FILES = sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])

PATHS = {"/" + path.relative_to(ROOT).as_posix() for top in TOP for path in (ROOT / top).rglob("*") if path.is_file()}
PATHS |= {"/" + path.name for path in ROOT.iterdir()}
OTHERS_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FILES_OF_HEAD = 4  # that a new draft head adds or changes, beside its tests
MAX_KERNEL_LINES = 90  # its arguments alone may be twenty

# Package -> packages it may import, beside itself. A module at the top (engine.py) counts as a package.
COMMON = {"errors", "config", "messages", "version"}
LINKS = {"runtime", "client"}
ENTRY = {  # an entry point may import those that it needs; others by `entrypoints.find`
    f"entrypoints/{name}": {"entrypoints", *(f"entrypoints/{other}" for other in needed)}
    for name, needed in entrypoints.NEEDS.items()
}
OF_COMMANDS = {"features", "engine", "hub", "bench", "metrics", "check", "train_draft"}
MAY_IMPORT: dict[str, set[str]] = {
    "entrypoints": {"config"},
    **dict.fromkeys(("errors", "version"), set()),
    **dict.fromkeys(("config", "messages"), {"errors"}),
    "hub": COMMON,
    "metrics": {"messages"},
    "runtime": COMMON,
    "client": COMMON | LINKS,
    "engine": COMMON | LINKS | {"hub", "features"},
    **{name: COMMON | needed | {"client", "metrics", "runtime"} for name, needed in ENTRY.items()},
    "entrypoints/cli": COMMON | LINKS | ENTRY["entrypoints/cli"] | OF_COMMANDS,
    "entrypoints/ray": COMMON | ENTRY["entrypoints/ray"] | {"runtime", "engine", "features"},
    "bench": COMMON | LINKS | {"engine", "hub"},
    "check": COMMON | {"features", "runtime", "hub", "models", "sampling", "speculative", "worker", "frontend"},
    "train_draft": COMMON | {"models", "speculative", "worker", "scheduler", "frontend"},
    "frontend": COMMON | LINKS,
    "scheduler": COMMON | {"runtime", "metrics"},
    "models": {"errors", "config", "hub"},
    "sampling": {"errors", "config", "messages", "models"},
    "speculative": {"errors", "config", "models", "sampling"},
    "worker": COMMON | {"runtime", "hub", "metrics", "models", "sampling", "speculative"},
    "features": COMMON | LINKS,
    "__init__": COMMON | LINKS | {"engine"},
    "__main__": {"entrypoints/cli"},
}
ROOTS = (  # they ask the table of features
    *("scheduler/build.py", "scheduler/scheduler_actor.py"),
    *("frontend/frontend_actor.py", "worker/worker_actor.py", "worker/build.py", "bench/scheduler.py"),
    *("worker/startup/geometry.py", "worker/startup/start_costs.py"),
)
OF_WORKER = (  # a feature's modules for the worker
    *("worker.py", "step.py", "window_masks.py", "slow_grammars.py"),
)
# A feature's module -> packages it may import too, top-level packages outside the project that it never imports.
ATTACH_TO: dict[str, tuple[set[str], set[str]]] = {
    "frontend.py": ({"frontend"}, {"torch", "triton", "transformers"}),
    "scheduler.py": ({"scheduler"}, {"torch", "triton", "numpy"}),
    **dict.fromkeys(OF_WORKER, ({"models", "sampling", "speculative", "worker"}, {"transformers"})),
    "ring.py": ({"models", "speculative", "worker"}, {"transformers"}),
    "learner.py": ({"models", "train_draft"}, {"transformers"}),
    "saved.py": ({"models", "train_draft"}, {"transformers"}),
}
ALSO = {  # one file's own exceptions
    **dict.fromkeys(ROOTS, {"features"}),
    "entrypoints/cli/verify.py": {"entrypoints/native"},  # what `verify` reads has its names
    "bench/workload.py": {"frontend"},  # makes token ids for an engine that has no tokenizer
    "entrypoints/cli/train_draft.py": {"frontend"},  # encodes prompts for an engine in its own process
    "features/adapt_draft/worker.py": {"train_draft"},  # whose loss and step it takes
    "bench/scheduler.py": {"features", "scheduler"},  # measures the scheduler by itself, against a fake worker
}
ONLY_INTERFACES = {"sampling", "speculative"}  # of models: what they need is declared in these files
INTERFACES = {
    "overlap_spec.models.interfaces",
    "overlap_spec.models.kv_cache",
    "overlap_spec.models.work",
    "overlap_spec.models.layers.attention_choice",
}
LOADS_MODELS = {"speculative/methods.py"}  # the table of methods says how each is loaded
# Package -> top-level packages outside the project that it never imports.
NEVER: dict[str, set[str]] = {
    **dict.fromkeys(
        COMMON | LINKS | ENTRY.keys() | {"entrypoints", "engine", "hub", "metrics", "__init__"}, {"torch", "triton"}
    ),
    "frontend": {"torch", "triton", "transformers"},
    "scheduler": {"torch", "triton", "numpy"},
    **dict.fromkeys(("models", "sampling", "speculative"), {"zmq", "transformers"}),
    "worker": {"transformers"},
}
METHODS = {*METHOD_FACTS, "EAGLE2", "MTP"}
METHODS_NAMED_IN = {"config/__init__.py", "config/speculation.py", "messages/request.py", "speculative/methods.py"}
ASK_WHICH_METHOD = ("config/", "bench/")  # they settle what runs, or compare methods
NAMES_OF_METHODS = {"PLAIN", "NGRAM", "MTP", "METHOD_FACTS"}
MAY_IMPORT_NAMES = {
    *METHODS_NAMED_IN,
    "hub/weight_files.py",  # suggests the method that drafts with a head
    *("features/__init__.py", "features/ngram/worker.py"),  # a method that is a feature
}

STEP_PATH = ("models/", "sampling/", "speculative/", "worker/")
OFF_STEP_PATH = (  # run once, at load or at start
    "models/loading/",
    "speculative/methods.py",
    "worker/startup/",
    "worker/worker_actor.py",
    "worker/build.py",
)
SYNCHRONIZING = {"item", "tolist", "cpu", "synchronize", "nonzero"}
HOST_SIDE = {
    # functions for a capture, a result that is out, a ring too small, or the end of the run
    ("worker/capture.py", "finish"),
    ("worker/devices.py", "finish"),
    ("worker/devices.py", "rows"),
    ("worker/devices.py", "blocks"),
    ("worker/devices.py", "upload"),
}


@functools.cache
def name_of(path: Path) -> str:
    """Its place below overlap_spec/, or below kernels/ for a kernel."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT / "kernels").as_posix()


def package_of(name: str) -> str:
    """The first folder; of an entry point, the first two."""
    first, _, rest = name.partition("/")
    return f"{first}/{rest.split('/')[0]}" if first == "entrypoints" and "/" in rest else first.removesuffix(".py")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """As `ast.walk`, without asking each node for fields that it does not have."""
    found: list[ast.AST] = [tree_of(path)]
    for node in found:  # which grows meanwhile
        for value in vars(node).values():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return tuple(found)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported, wherever, with its line; what only type checkers import counts too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            if module in ("overlap_spec", "overlap_spec.models", "overlap_spec.speculative"):
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def each_of(files: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test that looks at every file, and tells of each that breaks the rule: a test for each costs its start."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def look_at_all() -> None:
            broken = []
            for path in files:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(str(error))
            assert not broken, "\n".join(broken)

        look_at_all.__doc__ = rule.__doc__
        return look_at_all

    return decorate


every_file = each_of(FILES)
every_own_file = each_of([path for path in FILES if path.is_relative_to(PACKAGE)])


@every_own_file
def test_imports_follow_the_table(path: Path) -> None:
    package = package_of(name_of(path))
    assert package in MAY_IMPORT, f"{package}: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[package] | ALSO.get(name_of(path), set()) | {package}
    if package == "features":
        allowed |= ATTACH_TO.get(path.name, (set(), set()))[0]
    for imported, line in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {imported}"
        first, _, rest = imported.partition(".")
        assert first not in NEVER.get(package, set()), where
        if first == "overlap_spec" and rest:
            assert package_of(rest.replace(".", "/") + "/") in allowed, where
            inside = package == "messages" or not imported.startswith("overlap_spec.messages.")
            assert inside, f"{where}: import the package"
        if package in ONLY_INTERFACES and name_of(path) not in LOADS_MODELS:
            assert not imported.startswith("overlap_spec.models") or imported in INTERFACES, where


@every_own_file
def test_the_engine_names_no_feature(path: Path) -> None:
    """It asks the table. A feature may import the room that it attaches to, as little of torch as that."""
    name = name_of(path)
    never = ATTACH_TO[path.name][1] if package_of(name) == "features" and path.name in ATTACH_TO else set()
    for imported, line in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {imported}"
        if imported.startswith("overlap_spec.features."):
            assert package_of(name) == "features", where
        assert imported.partition(".")[0] not in never, where


@each_of(
    [PACKAGE / "scheduler" / f"{name}.py" for name in ("planner", "ledger", "loop", "queues", "requests", "hooks")]
)
def test_nothing_that_plans_knows_of_a_drafts_lag(path: Path) -> None:
    """The worker counts what its draft has left for later; the scheduler has one bound of it (`limits.py`)."""
    for node in nodes_of(path):
        for name in (getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None)):
            assert not re.search("defer|catch|caught", name or ""), f"{path.name}: {name}"


def test_no_plan_says_that_a_draft_lags() -> None:
    assert [name for name in StepPlan.__struct_fields__ if re.search("defer|catch|caught|rest", name)] == []


@each_of(sorted(KERNELS.rglob("*.py")))
def test_kernels_know_nothing_of_the_project(path: Path) -> None:
    for imported, line in imports_of(path):
        assert imported.split(".")[0] != "overlap_spec", f"{path.name}:{line} imports {imported}"


def test_the_folder_kernels_cannot_be_imported() -> None:
    """`kernels` is a package on PyPI that transformers looks for; ours would be taken for it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@every_file
def test_no_globals_and_one_reader_of_the_environment(path: Path) -> None:
    may_read = name_of(path) == "config/environment.py"
    for node in nodes_of(path):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno} declares a global"
        if not may_read and isinstance(node, ast.Attribute):
            read = node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name) and node.value.id == "os"
            assert not read, f"{path.name}:{node.lineno} reads the environment; config/environment.py does"


@every_file
def test_only_one_file_knows_the_names_of_methods(path: Path) -> None:
    if name_of(path) in METHODS_NAMED_IN:
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Constant):
            assert node.value not in METHODS, f"{path.name}:{node.lineno} names the method {node.value}"


def names_a_method(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("method", "speculative_algorithm")


@every_own_file
def test_nothing_asks_which_method_runs(path: Path) -> None:
    """What a method is, its records say (`MethodFacts`, `Method`, `DraftProfile`): no branch goes by its name."""
    if name_of(path).startswith(ASK_WHICH_METHOD):
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Compare):
            asked = any(names_a_method(side) for side in (node.left, *node.comparators))
            assert not asked, f"{path.name}:{node.lineno} asks which method runs"
        elif isinstance(node, ast.Match):
            assert not names_a_method(node.subject), f"{path.name}:{node.lineno} asks which method runs"
        elif isinstance(node, ast.ImportFrom) and name_of(path) not in MAY_IMPORT_NAMES:
            found = NAMES_OF_METHODS & {alias.name for alias in node.names}
            assert not found, f"{path.name}:{node.lineno} imports the names of methods: {found}"


def test_both_tables_of_methods_have_the_same_names() -> None:
    given = features.listed(features.WORKER, "METHODS")
    assert [method.name for method in (*METHOD_RECORDS, *given)] == list(METHOD_FACTS)


def test_a_draft_head_is_four_files_at_most() -> None:
    """Files that know of EAGLE's head: its model and its weights, `load_eagle`, its kind and facts, its method."""
    known = re.compile(r"\bEagle(Weights|Head|Config)\b|\bload_eagle\b|\bEAGLE_2\b|\"EAGLE\"")
    files = [name_of(path) for path in FILES if "eagle" in (text := text_of(path)).lower() and known.search(text)]
    assert "models/drafts/eagle.py" in files and len(files) <= MAX_FILES_OF_HEAD, files


def is_on_step_path(path: Path) -> bool:
    name = name_of(path)
    return name.startswith(STEP_PATH) and not name.startswith(OFF_STEP_PATH)


def calls_in(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Every method call below a node, with the name of the function it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield function, child
        yield from calls_in(
            child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        )


@each_of([path for path in FILES if is_on_step_path(path)])
def test_the_step_path_never_waits_for_the_device(path: Path) -> None:
    for function, call in calls_in(tree_of(path), ""):
        assert isinstance(call.func, ast.Attribute)
        if (name_of(path), function) not in HOST_SIDE:
            called = call.func.attr
            assert called not in SYNCHRONIZING, f"{path.relative_to(ROOT)}:{call.lineno} calls .{called}()"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated by `@TritonKernel` or `@TritonKernel.with_options(..)`, or those of Gluon."""
    names = {name.id for decorator in node.decorator_list for name in ast.walk(decorator) if isinstance(name, ast.Name)}
    return bool(names & {"TritonKernel", "GluonKernel"})


@every_file
def test_files_and_functions_are_small(path: Path) -> None:
    lines = len(text_of(path).splitlines())
    assert lines <= MAX_FILE_LINES, f"{path.name} has {lines} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            most = MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES
            assert length <= most, f"{path.name}:{node.lineno} {node.name} has {length} lines"


def is_public(name: str) -> bool:
    """A kernel's torch reference has its op's description."""
    return not name.startswith("_") and not name.endswith("_reference")


@every_file
def test_modules_classes_and_public_functions_say_what_they_are(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path.relative_to(ROOT)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name):
            assert ast.get_docstring(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has no docstring"


RULES = sorted({*MAY_IMPORT, *ALSO, *METHODS_NAMED_IN, *LOADS_MODELS, *STEP_PATH, *OFF_STEP_PATH})


@pytest.mark.parametrize("rule", RULES)
def test_rules_name_what_exists(rule: str) -> None:
    """A file or folder that moved must not leave a rule behind that looks at nothing."""
    path = PACKAGE / rule
    assert path.is_dir() or path.is_file() or path.with_suffix(".py").is_file(), rule


@pytest.mark.parametrize(("name", "function"), sorted(HOST_SIDE))
def test_exceptions_name_functions_that_exist(name: str, function: str) -> None:
    assert function in {node.name for node in nodes_of(PACKAGE / name) if isinstance(node, ast.FunctionDef)}


@every_file
def test_files_that_text_refers_to_exist(path: Path) -> None:
    """`name.py` in backticks, anywhere in a file, is the end of a path in the repository."""
    for reference in re.findall(r"`([\w./-]+\.(?:py|md|json|toml|cu))`", text_of(path)):
        found = any(other.endswith("/" + reference) for other in PATHS)
        assert found or reference in OTHERS_FILES, f"{path.relative_to(ROOT)} refers to {reference}"
