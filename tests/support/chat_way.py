"""The files that a plain chat runs on its way to the model: `python -m support.chat_way` prints them, one a line.

They are those of the package that run, in the server's process or one of the ring's, from just before the request is
sent until the target's first function is called. What runs by chance meanwhile, such as a heartbeat, is not among them:
a file counts if every one of many chats runs it. Nor are files that may as well run beside the target as before it.
"""

import os
import tempfile
import time
from pathlib import Path

import httpx

from support.called_files import called_during, hook
from support.command_line import Service, environment
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

CHATS = 20
REST_S = 0.05  # before a chat, so that nothing of the one before it is still under way
MODELS, TARGETS = "models/", "models/targets/"


def write_model(directory: Path) -> tuple[str, ...]:
    """A tiny model with a draft head. Returns the flags that serve it: an audit would run the target between chats."""
    (directory / "head").mkdir(parents=True)
    target = tiny_target(seed=1)
    write_checkpoint(directory, target)
    write_tokenizer(directory)
    write_checkpoint(directory / "head", tiny_eagle3(seed=2, target=target))
    draft = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(directory / "head"))
    return ("--model", str(directory), "--served-model-name", "tiny", "--audit-rate", "0", *draft)


def chat(url: str) -> None:
    """One question without options."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 4}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def rested_chat_way(url: str, pids: list[int], directory: Path) -> set[str]:
    """The files that one chat runs."""
    time.sleep(REST_S)
    return before_the_target(called_during(lambda: chat(url), pids, directory))


def before_the_target(times: dict[str, float]) -> set[str]:
    """Files outside `models/` that ran before the first of a target did."""
    reached = min(first for name, first in times.items() if name.startswith(TARGETS))
    return {name for name, first in times.items() if first < reached and not name.startswith(MODELS)}


def chat_way(directory: Path) -> list[str]:
    """The files, sorted. `directory`: an empty one."""
    flags = write_model(directory / "model")
    path = os.pathsep.join((hook(directory), environment(directory)["PYTHONPATH"]))
    with Service(directory, *flags, PYTHONPATH=path) as service:
        chat(service.url)  # what only the first chat of a server runs is not on the way
        pids = [service.process.pid, *service.children.values()]
        ways = [rested_chat_way(service.url, pids, directory) for _ in range(CHATS)]
    return sorted(set.intersection(*ways))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(*chat_way(Path(name)), sep="\n")
