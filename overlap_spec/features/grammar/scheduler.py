"""Requests with a grammar are held until the worker has compiled it.

    to come     alice: [a4 a5 a6 ..]  bob: [b9]     clients take turns
    compiling   a3 b8                               the worker has been asked for them
    compiled    a1 a2 b7                            queued, and wait for slots

The worker keeps a matcher for each request that it has been asked for, so no more than `most` requests are compiling or
compiled ahead of their slots: a client's thousands of grammars neither fill memory nor hold up those of others.

Each request of a group brings the same text, which is kept once. The worker is sent it when it is asked for the
grammar, and never with a slot.
"""

from collections import OrderedDict

from msgspec.structs import replace

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar import DropGrammar, GrammarFailed, GrammarReady, PrepareGrammar
from overlap_spec.messages import Extension, StepResult, ToWorker
from overlap_spec.runtime.heap import Repeated
from overlap_spec.runtime.transport import Outlet
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import Hooks, SchedulerHook
from overlap_spec.scheduler.queues import LARGE
from overlap_spec.scheduler.requests import Request, Step

MOST_PREPARED = 64  # grammars that are compiled ahead of their requests' slots, or one for each slot if that is more


def attach(parts: Parts) -> SchedulerHook:
    """Hold requests with a grammar."""
    return GrammarHolds(parts.hooks, parts.links.worker, max(MOST_PREPARED, parts.limits.num_slots))


class GrammarHolds(SchedulerHook):
    """Owner of the requests that it holds, and of which grammars the worker has."""

    def __init__(self, hooks: Hooks, worker: Outlet[ToWorker], most: int) -> None:
        self._hooks = hooks
        self._worker = worker
        self._most = most
        self._texts = Repeated()
        self._to_come: OrderedDict[str, dict[int, PrepareGrammar]] = OrderedDict()  # by client, next one first, by uid
        self._compiling: set[int] = set()
        self._compiled: set[int] = set()
        self._asked: set[int] = set()  # the worker has their grammars, until it is told to drop them

    def admitted(self, request: Request) -> bool:
        admit, grammar = request.admit, request.admit.sampling.grammar
        if grammar is None:
            return False
        if len(grammar.text) > LARGE:
            grammar = replace(grammar, text=self._texts.same("text", grammar.text))
        request.admit = replace(admit, sampling=replace(admit.sampling, grammar=replace(grammar, text="")))
        output = b"" if admit.resumed is None else admit.resumed.output
        self._to_come.setdefault(admit.client, {})[request.uid] = PrepareGrammar(request.uid, grammar, output)
        self._ask()
        return True

    def message(self, message: Extension) -> bool:
        """The worker has compiled a grammar, or can follow it no further. Its request may have ended meanwhile."""
        match message:
            case GrammarReady():
                if message.uid in self._compiling:
                    self._compiling.discard(message.uid)
                    self._compiled.add(message.uid)
                    self._hooks.release(message.uid)
            case GrammarFailed():
                self._hooks.fail(message.uid, RequestError("grammar", message.error))
            case _:
                return False
        self._ask()
        return True

    def started(self, request: Request) -> None:
        """Free a place for another grammar. It is asked for once the plan of this slot has left."""
        self._compiled.discard(request.uid)

    def settled(self, step: Step, result: StepResult) -> None:
        """Ask for the grammars for which slots that were taken have made room."""
        if self._to_come:
            self._ask()

    def closed(self, request: Request) -> None:
        """Tell the worker, if it has the grammar."""
        if request.admit.sampling.grammar is None:
            return
        self._compiling.discard(request.uid)
        self._compiled.discard(request.uid)
        self._take_out(request)
        if request.uid in self._asked:
            self._asked.discard(request.uid)
            self._worker.send(DropGrammar(request.uid))
        self._ask()

    def _take_out(self, request: Request) -> None:
        """Forget one that the worker has not been asked for."""
        client = request.admit.client
        of_client = self._to_come.get(client, {})
        of_client.pop(request.uid, None)
        if not of_client:
            self._to_come.pop(client, None)

    def _ask(self) -> None:
        """Ask the worker for grammars, as many as there is room for."""
        while self._to_come and len(self._compiling) + len(self._compiled) < self._most:
            client, of_client = self._to_come.popitem(last=False)
            message = of_client.pop(next(iter(of_client)))
            if of_client:
                self._to_come[client] = of_client
            self._compiling.add(message.uid)
            self._asked.add(message.uid)
            self._worker.send(message)
