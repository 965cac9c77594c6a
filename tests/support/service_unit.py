"""What a service manager does with a unit file, as far as `deploy/overlap-spec.service` asks for it."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

UNIT = Path(__file__).parents[2] / "deploy/overlap-spec.service"
REPEATABLE = "Environment"


def settings_of(text: str) -> dict[str, str]:
    """Names and values of all sections; a name that is given twice is an error, but for Environment."""
    pairs = [line.partition("=")[::2] for line in text.splitlines() if re.match(r"[A-Z]\w+=", line)]
    names = [name for name, _ in pairs if name != REPEATABLE]
    assert len(names) == len(set(names)), "a unit's setting is given twice"
    return dict(pairs)


def command_of(unit: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """The words of ExecStart. `$NAME` becomes words, `${NAME}` a part of one, as systemd.service(5) has it."""
    words: list[str] = []
    for word in shlex.split(unit["ExecStart"]):
        whole = re.fullmatch(r"\$(\w+)", word)
        if whole:
            words += shlex.split(variables.get(whole[1], ""))
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    return words


def is_started_again(unit: Mapping[str, str], status: int) -> bool:
    """After an end with this status (negative: the signal). SIGTERM and its like count as a clean end there."""
    assert unit["Restart"] == "on-failure"
    is_clean = status in (0, -1, -2, -13, -15)  # SIGHUP, SIGINT, SIGPIPE, SIGTERM
    return not is_clean and str(status) not in unit["RestartPreventExitStatus"].split()


def descendants(pid: int) -> Iterator[int]:
    """Every process below this one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    below = list(parents.get(pid, []))
    while below:
        each = below.pop()
        below += parents.get(each, [])
        yield each


def shared_memory_of(pid: int) -> set[Path]:
    """The files in /dev/shm that a process has mapped: what else is there is other programs'."""
    return set(map(Path, re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())))
