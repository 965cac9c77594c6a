"""The shape of the tree in numbers, none of which may get worse.

    python .ci/shape.py             prints the numbers; fails if one is worse than in `shape.json`
    python .ci/shape.py --way       counts also which files a chat runs: it starts a server, as tests do
    python .ci/shape.py --list      prints what each number counts: files, imports, circles
    python .ci/shape.py --update    writes the better numbers to `shape.json`; with `--allow NAME` a worse one, too
    python .ci/shape.py --since NAME  prints by which commits that number has changed
    python .ci/shape.py --root DIR  of another tree: one that `git archive COMMIT` was unpacked to

**The engine** runs one request and one step: the rooms in `ENGINE`. A feature is a folder of `features/`, and no part
of it. Lines and files of the engine leave out what runs at start alone (`STARTUP`); all other numbers of the engine
include it.

**A file names a feature** where one of the feature's words stands in its code (`WORDS`). Comments and docstrings do not
count. A draft's lag is no feature: at width 1 a proposer leaves rows for later, and the worker counts them. Its files
are counted all the same; no plan knows of it (`tests/unit/test_architecture.py`).
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from source_tree import Tree, circles, lines_of

KEPT = Path(__file__).with_name("shape.json")

ENGINE = (
    *(f"{room}/*" for room in ("frontend", "scheduler", "worker", "speculative", "sampling", "runtime")),
    *("messages/ring*", "messages/extensions.py"),  # what processes of the ring say to each other
)
STARTUP = ("worker/startup/*", "runtime/source.py")  # the last one: where a report is written
WORDS = {  # whole names; `*` stands for any letters
    "audit": "*audit* lead leads *_leads lead_* margin margins transcript* *Transcript* decode_plainly StopSpeculating",
    "grammar": "*grammar* *Grammar* masking *Masking masks *TokenMasks mask_words masked constrained *forced*",
    "log-probs": "*log_prob* *logprob* *LogProb* scored scored_* *_scored",
    "mixed batches": "*joined* *Joined* *Joiner* joiner* *_joiner joins _joins mid_pair *launch_pair _pair *mixed*",
    "n-grams": "*ngram* *Ngram* rests resting *resting* strengths next_columns *Lookahead* lookahead",
    "penalties": "*penalt* *bad_word* *logit_bias* *biases* *slot_lists* *SlotLists* *packed_lists* *PackedLists*",
    "thinking": "*thinking* *reasoning* *_BUDGET packed_budget with_budget after_budget",
    "a draft's lag": "*defer* *catch_up* *catches_up* *caught_up*",
}
OTHER_SENSE = {
    ("mixed batches", "frontend/*"),  # rows of a stream are joined
    ("log-probs", "speculative/proposers/tree.py"),  # what its nodes are chosen by
}
DECIDE_WIDTHS = ("scheduler/width.py", "features/adaptive_width/*")  # how wide decode steps are: at most 500 lines
LONG_FILE = 400
SMALL = 30  # a change that `--since` does not list by itself
SPREAD = 3  # files more or less from one run of a chat to the next, on machines of different speed
WAY, LONG_ON_WAY = "files on a plain chat's way", f"files on that way over {LONG_FILE} lines"


def engine(tree: Tree) -> list[str]:
    """The engine's files."""
    return [name for name in tree.files if matches(name, ENGINE)]


def that_name(tree: Tree, feature: str) -> list[str]:
    """Engine files with a word of the feature in their code."""
    others = [pattern for other, pattern in OTHER_SENSE if other == feature]
    names = [name for name in engine(tree) if not matches(name, others)]
    return [name for name in names if any(is_word(word, feature) for word in tree.code_words(name))]


def features_imported(tree: Tree) -> list[str]:
    """Every engine file with each module of a feature that it imports."""
    pairs = [(name, other) for name in engine(tree) for other in sorted(tree.imports[name])]
    return [f"{name} -> {other}" for name, other in pairs if feature_of(other)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def feature_of(name: str) -> str:
    """The feature that a file belongs to, "" for none. The registry of `features/` belongs to none of them."""
    room, _, rest = name.partition("/")
    folder, _, inside = rest.partition("/")
    return folder if room == "features" and inside else ""


@cache
def is_word(word: str, feature: str) -> bool:
    return matches(word, WORDS[feature].split())


def rooms(tree: Tree) -> dict[str, set[str]]:
    """The graph of the rooms: which folder at the top imports which. A file at the top is a room of its own."""
    graph = defaultdict[str, set[str]](set)
    for name, imported in tree.imports.items():
        graph[room_of(name)] |= {room_of(other) for other in imported} - {room_of(name)}
    return graph


def room_of(name: str) -> str:
    """The table of features is one too: rooms ask it, and features, which it does not import, import rooms."""
    return name if name == "features/__init__.py" else name.split("/")[0]


def one_importer(tree: Tree) -> list[str]:
    """Modules that one other module imports; an `__init__.py` that passes names on does not count as one."""
    importers = defaultdict[str, list[str]](list)
    for name, imported in tree.imports.items():
        for other in imported if not name.endswith("__init__.py") else ():
            importers[other].append(name)
    return sorted(name for name, by in importers.items() if len(by) == 1 and not name.endswith("__init__.py"))


def chat_way(root: Path) -> list[str]:
    """Files that run between a chat's request and the target's first layer."""
    path = os.pathsep.join(str(root / folder) for folder in (".", "kernels", "tests"))
    run = [sys.executable, "-m", "support.chat_way"]
    told = subprocess.run(run, cwd=root, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
    return told.stdout.decode().split()


def counted(tree: Tree, way: list[str] | None) -> dict[str, list[str]]:
    """What each number counts, by the number's name. `way`: None if it is not counted this time."""
    found = {
        "engine files": [name for name in engine(tree) if not matches(name, STARTUP)],
        **{f"engine files that name {feature}": that_name(tree, feature) for feature in WORDS},
        "imports engine -> feature": features_imported(tree),
        "Python files of the package": [name for name in tree.files if not name.startswith("kernels/")],
        "modules with one importer": one_importer(tree),
        "import circles": [" <-> ".join(group) for group in circles(tree.imports)],
        "package cycles": [" <-> ".join(group) for group in circles(rooms(tree))],
    }
    if way is not None:
        found[WAY] = way
        found[LONG_ON_WAY] = [name for name in way if lines_of(tree.files[name]) > LONG_FILE]
    return found


def numbers(tree: Tree, found: dict[str, list[str]]) -> dict[str, int]:
    """Every number by its name. Less is better."""
    results = [path for path in (tree.root / "benchmarks" / "results").rglob("*") if path.is_file()]
    return {
        "engine lines": lines_of(*(tree.files[name] for name in found["engine files"])),
        **{name: len(files) for name, files in found.items()},
        "lines of both packages": lines_of(*tree.paths),
        "lines that decide widths": lines_of(
            *(tree.files[name] for name in tree.files if matches(name, DECIDE_WIDTHS))
        ),
        "kB of benchmarks/results": sum(path.stat().st_size for path in results) // 1000,
    }


def since(name: str) -> Iterator[str]:
    """What has come to a number since it was kept first, by commit; changes below `SMALL` are one line."""
    changes = list[tuple[int, str]]()
    before: int | None = None
    for commit in reversed(_git("log", "--format=%h %s", "--", ".ci/shape.json").splitlines()):
        number = json.loads(_git("show", f"{commit.split()[0]}:.ci/shape.json")).get(name)
        if number is None or number == before:
            continue
        changes.append((number - (before or 0), commit))
        before = number
    yield from (f"{change:+7,}  {commit}" for change, commit in changes if abs(change) >= SMALL)
    small = [change for change, _ in changes if abs(change) < SMALL]
    yield f"{sum(small):+7,}  in {len(small)} commits of fewer than {SMALL} each"
    yield f"{before or 0:7,}  {name}"


def _git(*arguments: str) -> str:
    run = ["git", "-C", str(KEPT.parents[1]), *arguments]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout


def is_worse(name: str, number: int, kept: dict[str, int]) -> bool:
    return name in kept and number > kept[name] + (SPREAD if name == WAY else 0)


def main() -> int:
    """Returns the exit status: 1 if a number is worse than the one that is kept."""
    parser = argparse.ArgumentParser(description="The shape of the tree in numbers, none of which may get worse.")
    parser.add_argument("--root", type=Path, default=KEPT.parents[1])
    parser.add_argument("--way", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME")
    parser.add_argument("--since", metavar="NAME")
    asked = parser.parse_args()
    if asked.since:
        print("\n".join(since(asked.since)))
        return 0
    tree = Tree(asked.root)
    found = counted(tree, chat_way(asked.root) if asked.way else None)
    kept: dict[str, int] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    now = numbers(tree, found)
    worse = [name for name in now if name not in asked.allow and is_worse(name, now[name], kept)]
    for name, number in now.items():
        print(f"{number:7,}  {name}" + (f" (at most {kept[name]:,})" if name in kept else ""))
        for each in found.get(name, ()) if asked.list else ():
            print(f"             {each}")
    if asked.update:
        better = {name: now[name] for name in now if name in asked.allow or now[name] <= kept.get(name, now[name])}
        KEPT.write_text(json.dumps(kept | better, indent=2) + "\n")
    for name in worse:
        print(f"worse: {name}: {now[name]:,}, at most {kept[name]:,} (`--list` prints them)", file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
