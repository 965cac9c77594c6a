"""Fuzzing for a given time. A failure ends a round, not the run: it is made small, noted, and looked for no further.

A round is a run of hypothesis with a seed of its own, which repeats it: `--seed N` of the first round, N + 1 of the
second, and so on.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

CASES_A_ROUND = 200
MOST_SHOWN = 4000  # characters of a case
MOST_FAILURES = 40  # kinds of them, after which something else is wrong


@dataclass
class Failure:
    """One kind of failure. `case`: the smallest that was found. `seen`: how often."""

    kind: str
    seed: int
    error: str
    case: str
    seen: int = 1


class Campaign:
    """Sends cases until the time is up. `seed`: of the first round."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self.first_seed = seconds, seed
        self.failures: dict[str, Failure] = {}
        self.num_cases = self.num_rounds = 0
        self._deadline = time.monotonic() + seconds

    def run(
        self, check: Callable[[Any], None], strategy: SearchStrategy[Any], after_round: Callable[[], str]
    ) -> list[Failure]:
        """`check` raises for a case that fails. `after_round` returns what is wrong with the server, or ""."""
        while time.monotonic() < self._deadline and len(self.failures) < MOST_FAILURES:
            seed = self.first_seed + self.num_rounds
            self._round(check, strategy, seed)
            self.num_rounds += 1
            if wrong := after_round():
                self._note(Failure(f"after a round: {kind_of(wrong)}", seed, wrong[:MOST_SHOWN], ""))
        return list(self.failures.values())

    def figures(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "cases": self.num_cases,
            "rounds": self.num_rounds,
            "cases_a_round": CASES_A_ROUND,
            "seed": self.first_seed,
            "seconds": round(self.seconds, 1),
            "failures": [asdict(each) for each in self.failures.values()],
        }

    def _note(self, failure: Failure) -> None:
        known = self.failures.setdefault(failure.kind, failure)
        if known is not failure:
            known.seen += failure.seen

    def _round(self, check: Callable[[Any], None], strategy: SearchStrategy[Any], seed: int) -> None:
        """Until a new kind of failure has been found and made small, or all cases of a round have been sent."""
        known, seen = dict(self.failures), Counter[str]()
        smallest: dict[str, Failure] = {}

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=CASES_A_ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.given(strategy)
        def send(case: Any) -> None:
            self.num_cases += 1
            try:
                check(case)
            except Exception as error:  # whatever it is, it is this case's
                kind = kind_of(error)
                if kind in known:
                    seen[kind] += 1
                    return
                shown = repr(case)
                if kind not in smallest or len(shown) <= len(smallest[kind].case):
                    smallest[kind] = Failure(kind, seed, f"{type(error).__name__}: {error}"[:MOST_SHOWN], shown)
                raise

        try:
            send()
        except Exception as error:
            if not smallest:  # of hypothesis itself
                self._note(Failure(kind_of(error), seed, f"{type(error).__name__}: {error}"[:MOST_SHOWN], ""))
        for failure in smallest.values():
            failure.case = failure.case[:MOST_SHOWN]
            self._note(failure)
        for kind, times in seen.items():
            self.failures[kind].seen += times


def kind_of(error: Exception | str) -> str:
    """What failures of one cause have in common: the error's words up to its data."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return re.sub(r"\d+|0x[0-9a-f]+|'[^']*'|\"[^\"]*\"", "_", text.strip().partition("\n")[0])[:100]
