"""Declares an attack, and what it must come to."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from support.attacks.attacker import Attacker, Reply
from support.attacks.servers import METHODS

Attack = Callable[[Attacker], Awaitable[str]]
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """`attack` returns what the attacker got, in a few words, and asserts that it is right.

    `honest`: the same device work (tokens, choices, rows with log-probs) by a request as any user sends; a quiet server
    where there is none. The victim may wait `LATER_S` longer than beside it, and at least `least_s`.
    `poll`: the victim's small requests. `seconds` of the attack, and at least of the victim's watch.
    `bounds_peak`: the peak of memory is judged, beyond that of the honest request. `answer_mib`: what the attacker's
    answer itself takes. `pool_mib`: what its tokens take in the worker's KV pool, whose pages are memory from when they
    are first used: the honest request's tokens stay in the prefix cache, so these may be given others.
    """

    name: str
    rule: int
    attack: Attack
    finding: int | None = None
    servers: tuple[str, ...] = ("plain",)
    seconds: float = 5.0
    honest: Attack | None = None
    poll: str = "health"
    poll_s: float = 0.0
    least_s: float = 0.0
    victim_rid: str = ""
    bounds_peak: bool = False
    answer_mib: int = 0
    pool_mib: int = 0
    ci: str = ""  # the server of the findings' quick run, if it is another than the first

    @property
    def ci_server(self) -> str:
        return self.ci or self.servers[0]

    @property
    def label(self) -> str:
        return f"finding {self.finding}" if self.finding else f"rule {self.rule}"


class Cases:
    """A list that attacks are declared into."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def add(self, rule: int, **given: object) -> Callable[[Attack], Attack]:
        """Declares the function that follows, whose name is the case's."""

        def declare(attack: Attack) -> Attack:
            name = attack.__name__.replace("_", "-")
            self.all.append(Case(name, rule, attack, **given))
            return attack

        return declare


EVERY_METHOD: tuple[str, ...] = METHODS  # of stops, grammars and log-probs


def unread(text: str) -> str:
    """With a first word of its own: no prefix cache has it, and a case that is played again finds the same work."""
    return f"{secrets.token_hex(4)} {text}"


def refused(reply: Reply, field: str, *words: str, status: int = 400) -> str:
    """Fail unless the answer names the field and has these words. Returns its status, and the field."""
    error = reply.error
    assert reply.status == status, f"expected {status}: {reply.short()}"
    message = str(error.get("message", ""))
    assert field in (str(error.get("param")), "") or field in message, f"does not name {field}: {reply.short()}"
    plain = message.replace(",", "")  # 1,000 and 1000 are the same limit
    missing = [word for word in words if word.replace(",", "") not in plain]
    assert not missing, f"does not have {missing}: {reply.short()}"
    return f"{status} `{field}`" if field else str(status)


def answered(reply: Reply) -> str:
    """Fail unless it was answered."""
    assert reply.status == 200, f"expected an answer: {reply.short()}"
    return "its answer"


def answered_or_refused(reply: Reply, field: str, *words: str) -> str:
    """Either is right."""
    return answered(reply) if reply.status == 200 else refused(reply, field, *words)


def all_the_same(outcomes: Sequence[str]) -> str:
    """The outcomes of many requests, each once."""
    return "; ".join(dict.fromkeys(outcomes))
