"""The servers that are attacked: a tiny Llama with a real tokenizer, keys, and what the users of such a server need.

All flags but these are defaults.

    plain, eagle3, ngram    three methods; keys of the victim, the attacker and the operator; ZMQ over TCP
    small                   as `plain`; a queue of 20, two slots, templates of requests, a key file that all can read
    open                    without keys
"""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from support.attacks.victim import TOKEN_IDS
from support.command_line import Service, is_running
from support.small_tokenizers import SMOLLM2
from support.tiny.models import TinyCheckpoint, tiny_eagle3, tiny_target, write_checkpoint

VOCABULARY, CONTEXT = 49152, 8192
METHODS = ("plain", "eagle3", "ngram")
SERVERS = (*METHODS, "small", "open")
KEYS = {"victim": "key-of-the-victim", "attacker": "key-of-the-attacker"}
ADMIN_KEY = "key-of-the-operator"
FLAGS = {
    "plain": (),
    "eagle3": ("--speculative-algorithm", "EAGLE3"),  # and its head
    "ngram": ("--speculative-algorithm", "NGRAM"),
    "small": ("--max-queued-requests", "20", "--max-running-requests", "2", "--trust-request-chat-template"),
    "open": (),
}


def write_model(directory: Path) -> Path:
    """Two layers, hidden size 64, SmolLM2's tokenizer and vocabulary, and an EAGLE-3 head in `head/`."""
    target = tiny_target(seed=1, hidden=64, vocab=VOCABULARY, max_position_embeddings=CONTEXT)
    head = tiny_eagle3(seed=2, target=target, draft_vocab=4096)
    for path, checkpoint in ((directory, target), (directory / "head", head)):
        write_checkpoint(path, _in_float32(checkpoint))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMOLLM2 / name, directory / name)
    return directory


def _in_float32(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    tensors = {name: each.float() if each.is_floating_point() else each for name, each in checkpoint.tensors.items()}
    return TinyCheckpoint(checkpoint.config, tensors)


class AttackedServer:
    """A server of one kind. `ready` starts it, and starts another one where a case has done for it."""

    def __init__(self, kind: str, model: Path, directory_of: Callable[[str], Path]) -> None:
        self.kind = kind
        self._model = model
        self._directory_of = directory_of
        self._left = ExitStack()
        self._service: Service | None = None

    def ready(self) -> Service:
        """The service; its processes are the same until `replace`."""
        if self._service is None or not is_running(self._service.process.pid):
            self.replace()
            directory = self._directory_of(self.kind)
            self._service = self._left.enter_context(Service(directory, *self._flags(directory)))
            self._warm_up(self._service)
        return self._service

    def replace(self) -> None:
        """End it; the next `ready` starts another one."""
        self._left.close()
        self._service = None

    @property
    def has_keys(self) -> bool:
        return self.kind != "open"

    def key(self, name: str) -> str:
        """The key of victim or attacker; "" where there are none."""
        return KEYS[name] if self.has_keys else ""

    def _flags(self, directory: Path) -> list[str]:
        flags = ["--model", str(self._model), "--dtype", "float32", "--zmq-endpoint", "tcp://127.0.0.1:0"]
        flags += [*FLAGS[self.kind]]
        if self.kind == "eagle3":
            flags += ["--speculative-draft-model-path", str(self._model / "head")]
        if self.has_keys:
            keys = directory / "keys"
            keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
            keys.chmod(0o644 if self.kind == "small" else 0o600)
            flags += ["--api-key-file", str(keys), "--admin-api-key", ADMIN_KEY]
        return flags

    def _warm_up(self, service: Service) -> None:
        """Take what the first requests of each kind take for good: threads, caches, torch's memory.

        Servers of other kinds than the methods' are asked for few tokens, and for nothing that needs the rest.
        """
        headers = {"authorization": f"Bearer {self.key('victim')}"} if self.has_keys else {}
        with httpx.Client(base_url=service.url, headers=headers, timeout=120) as http:
            for path, body in WARM_UP if self.kind in METHODS else FIRST_REQUESTS:
                reply = http.post(path, json=body)
                assert reply.status_code == 200, f"{path} {str(body)[:80]}: {reply.text}"


FEW: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
FIRST_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TOKEN_IDS, "max_tokens": 200, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8}),
]
WARM_UP = [
    *FIRST_REQUESTS,
    ("/v1/completions", {"prompt": "hello " * 4000, **FEW}),
    ("/v1/completions", {"prompt": "hello " * 200, "echo": True, "logprobs": 5, **FEW}),
    ("/v1/completions", {"prompt": "x", "n": 16, "logprobs": 5, **FEW}),
    ("/v1/completions", {"prompt": "x", "regex": "[0-9]+", "max_tokens": 8}),
    ("/v1/completions", {"prompt": "x", "json_schema": '{"type":"object"}', "max_tokens": 8}),
    ("/v1/completions", {"prompt": "x", "stop": ["zzzz"], "stop_regex": ["z{4}"], "logit_bias": {"5": 1}, **FEW}),
    ("/tokenize", {"prompt": "hello world " * 3000}),
]
