"""Measure what README and docs quote of a GPU, part by part, into `benchmarks/results/CARD/`.

    python benchmarks/record.py                      the parts that the code has left behind, in nine minutes
    python benchmarks/record.py --parts tests        one of the core's three: the GPU tests
    python benchmarks/record.py --parts tables       steps of the 8B's shape; `records/parts.py` names the tables
    python benchmarks/record.py --parts more_tables  SmolLM2's steps; sampled steps, first tokens and gaps of both
    python benchmarks/record.py --list               every part: fresh, stale, missing or cut off, and its seconds
    python benchmarks/record.py --list --card h200   the same on a machine without that card

A part that is cut off goes on with the next call. Before it starts it prints what it will not measure, and why; the
exit status is 1 if something is left. The files of a machine without git name their commit if
`python -m overlap_spec.runtime.source` has written it where there was one.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from records.measure import Machine, Site, find_machine, measure, remaining_s
from records.parts import MOST_S, PARTS, Part, Parts, hashes_of, parts_of
from records.reader import CUT_OFF, FRESH, digest_of, newest_complete, sentence, state_of

from overlap_spec.runtime.source import UNKNOWN, measured_paths, source_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"


def refusal(site: Site, parts: Parts) -> str:
    """Why nothing is measured; empty if something can be."""
    commit = site.source.commit
    if not site.machine.device:
        return "no GPU: the driver names none; nothing is measured"
    if not parts:
        return f"no part belongs to the record of {site.machine.card}; nothing is measured"
    if commit.endswith("+"):
        return f"the tree has changes that commit {commit[:-1]} does not have: commit them first; nothing is measured"
    return ""


def warnings(site: Site, parts: Sequence[Part]) -> Iterator[str]:
    """What will not be measured in the time that is given, and what files will not name."""
    if site.source.commit == UNKNOWN:
        yield "no git and no manifest: files will not name a commit"
    left_s = site.left_s()
    for part in parts:
        needed = remaining_s(site, part)
        if needed > left_s:
            yield f"too little time: {part.name} takes about {needed} s, {max(left_s, 0):.0f} s are left for it"
        left_s -= needed


def measure_all(site: Site, parts: Sequence[Part]) -> int:
    """Measure the parts, the others also if one fails. Returns the exit status."""
    print(f"{site.machine.device}, commit {site.source.commit}: {', '.join(part.name for part in parts) or 'nothing'}")
    for warning in warnings(site, parts):
        print(warning, flush=True)
    problems = {part.name: problem for part in parts if (problem := measure(site, part))}
    for name, problem in problems.items():
        print(f"{name} is not whole: {problem}", flush=True)
    return 1 if problems else 0


def list_parts(site: Site, parts: Parts) -> None:
    """Print the state of every part, and the record's sentence."""
    for part in parts:
        state = state_of(site.folder, part, site.hashes)
        left = f", {remaining_s(site, part)} s are left" if state == CUT_OFF else ""
        print(f"{part.name:11} {state:8} {part.seconds:4d} s{left}")
    print(sentence(newest_complete(site.results, site.machine.card), site.hashes, site.root, parts))


def chosen(names: str | None, site: Site, parts: Parts) -> list[Part]:
    """Those that are named, or all, without those that are of this code. Raises: KeyError for an unknown name."""
    known = {part.name: part for part in parts}
    wanted = [known[name] for name in names.split(",")] if names else list(parts)
    return [part for part in wanted if state_of(site.folder, part, site.hashes) != FRESH]


def site_of(root: Path, results: Path, machine: Machine, parts: Parts, limit_s: float) -> Site:
    """The parts are all of the machine's card."""
    hashes = hashes_of(root, parts)
    source = source_of({name: root / name for name in measured_paths(root)}, root)
    record = {part.name: digest_of(part, hashes) for part in parts}
    return Site(root, results, machine, source, hashes, record, time.monotonic() + limit_s)


def main(words: list[str], root: Path = ROOT, table: Parts = PARTS, machine: Machine | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names, with commas; default: all of the card")
    parser.add_argument("--limit-s", type=float, default=float(MOST_S), help="time of everything, at most")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--card", help="whose parts are listed; default: the GPU's")
    arguments = parser.parse_args(words)
    if arguments.card and not arguments.list:
        parser.error("--card goes with --list")
    machine = Machine(arguments.card, "") if arguments.card else machine or find_machine()
    if arguments.list and not machine.card:
        cards = sorted({card for part in table for card in part.cards})
        parser.error(f"no GPU: say whose parts with --card {' or '.join(cards)}")
    parts = parts_of(machine.card, table)
    site = site_of(root, root / RESULTS, machine, parts, arguments.limit_s)
    if arguments.list:
        list_parts(site, parts)
        return 0
    if reason := refusal(site, parts):
        print(reason)
        return 1
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what it has started ends, too
    try:
        return measure_all(site, chosen(arguments.parts, site, parts))
    except KeyError as name:
        parser.error(f"no part {name}; {machine.card} has {', '.join(part.name for part in parts)}")
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
