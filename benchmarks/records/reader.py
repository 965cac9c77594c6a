"""Reads the record of a card: the newest complete one, how old it is, and which parts the code has left behind.

    results/CARD/PART-DIGEST.json    a part that was measured whole; the digest is that of what it depends on
    results/CARD/PART.partial/       a part that was begun; no reader opens it

Every file holds the digests that all parts of the record had in the tree that it was measured in. A record is complete
if a file of each of these digests is there, no matter when it was measured. Files of other trees may lie beside them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.runtime.source import COMMIT_DIGITS, PACKAGES, UNKNOWN, git_output
from records.parts import PARTS, Hashes, Part, Parts, parts_of

Json = dict[str, Any]

FRESH, STALE, MISSING, CUT_OFF = "fresh", "stale", "missing", "cut off"
NO_RECORD = "*Not measured whole yet.*"
MOST_COMMITS = 1000  # that are searched for a tree
AGE = re.compile(r", \d+ commits? ago[^*]*")
_NO_VARIANT = re.compile(r"nvidia|geforce|tesla|\d+gb|hbm\w*")


class MixedCards(ValueError):
    """A file lies in the folder of another card."""


@dataclass(frozen=True)
class Record:
    """A complete record. `run`: of its newest part; all parts agree with the source of it. `parts`: their files."""

    card: str
    run: Json
    parts: Mapping[str, Json]

    def report(self, part: str, name: str) -> Json:
        """What a command of a part has written. Raises: KeyError for what the record does not have."""
        found: Json = self.parts[part]["reports"][name]
        return found

    def stale(self, hashes: Hashes, parts: Parts = PARTS) -> list[str]:
        """Parts of this record whose code is another one now, and those that it does not have."""
        own = {name: file["digest"] for name, file in self.parts.items()}
        return [part.name for part in parts_of(self.card, parts) if own.get(part.name) != digest_of(part, hashes)]


def card_of(device: str) -> str:
    """A folder's name for a device: `h200` for NVIDIA H200. Variants that differ in speed keep theirs: `h100-nvl`."""
    words = re.split(r"[\s-]+", device.lower())
    return "-".join(word for word in words if word and not _NO_VARIANT.fullmatch(word))


def digest_of(part: Part, hashes: Hashes) -> str:
    """Of a part's commands and of all that it depends on."""
    parts = [[command.words for command in part.commands], [[path, hashes[path]] for path in part.depends]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:COMMIT_DIGITS]


def file_of(folder: Path, part: Part, hashes: Hashes) -> Path:
    """Where the part of this code is, or will be."""
    return folder / f"{part.name}-{digest_of(part, hashes)}.json"


def partial_of(folder: Path, part: Part) -> Path:
    """The folder of a part that was begun."""
    return folder / f"{part.name}.partial"


def state_of(folder: Path, part: Part, hashes: Hashes) -> str:
    """Whether a part was measured, and whether with this code."""
    if file_of(folder, part, hashes).is_file():
        return FRESH
    if partial_of(folder, part).is_dir():
        return CUT_OFF
    return STALE if list(folder.glob(f"{part.name}-*.json")) else MISSING


def newest_complete(results: Path, card: str) -> Record | None:
    """The newest complete record of a card. Raises: MixedCards."""
    files = _files(results, card)
    for newest in reversed(files):
        device = newest["run"]["device"]
        own = {(file["part"], file["digest"]): file for file in files if file["run"]["device"] == device}
        if all(wanted in own for wanted in newest["record"].items()):
            return Record(card, newest["run"], {part: own[part, digest] for part, digest in newest["record"].items()})
    return None


def reports_of(results: Path, card: str) -> dict[str, Json]:
    """What documents show of a card, as `PART, COMMAND`: the newest complete record, or else the newest of every part.

    Raises: MixedCards.
    """
    record = newest_complete(results, card)
    parts = record.parts if record else {file["part"]: file for file in _files(results, card)}
    return {f"{part}, {name}": report for part, file in parts.items() for name, report in file["reports"].items()}


def sentence(record: Record | None, hashes: Hashes, root: Path, parts: Parts = PARTS) -> str:
    """For the top of a document: on what its figures were measured, at which commit, and how old that is."""
    if record is None:
        return NO_RECORD
    known = str(record.run["commit"])
    commit = known if known != UNKNOWN else commit_of(root, record.run["source"]["trees"])
    text = f"Measured on one {record.run['device']} at commit {commit}"
    if since := commits_since(root, commit):
        text += f", {since} commit{'s' if since > 1 else ''} ago"
        stale = record.stale(hashes, parts)
        text += f"; {len(stale)} of {len(record.parts)} parts are older than the code: {', '.join(stale)}" * bool(stale)
    return f"*{text}.*"


def without_age(text: str) -> str:
    """The text without what every commit changes in `sentence`, to compare a document with what it should be."""
    return AGE.sub(".", text)


def commits_since(root: Path, commit: str) -> int | None:
    """Commits after this one, up to git's HEAD; None if git does not know it."""
    count = git_output(root, "rev-list", "--count", f"{commit}..HEAD") if commit != UNKNOWN else ""
    return int(count) if count else None


def commit_of(root: Path, trees: Mapping[str, str]) -> str:
    """The newest commit in which the packages have these hashes; `UNKNOWN` if git has none."""
    commits = git_output(root, "log", f"-{MOST_COMMITS}", f"--abbrev={COMMIT_DIGITS}", "--format=%h").split()
    found = [git_output(root, "rev-parse", *(f"{each}:{name}" for each in commits)).split() for name in PACKAGES]
    wanted = [trees.get(name) for name in PACKAGES]
    return next((each for each, *have in zip(commits, *found, strict=False) if have == wanted), UNKNOWN)


def _files(results: Path, card: str) -> list[Json]:
    """The parts that were measured whole, the newest last."""
    return sorted(map(_read, (results / card).glob("*.json")), key=lambda file: str(file["run"]["when"]))


def _read(path: Path) -> Json:
    file: Json = json.loads(path.read_text())
    device = file["run"]["device"]
    if not file["card"] == card_of(device) == path.parent.name:
        raise MixedCards(f"{path} was measured on {device}")
    return file
