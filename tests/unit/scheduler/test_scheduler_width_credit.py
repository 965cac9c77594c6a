"""Whether lookups pay, against texts that are played: windows change as tokens come. Time is the costs' own."""

import pytest
from support.played_texts import Text

from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth, StepSeconds
from overlap_spec.features.ngram.scheduler import MatchedTokens
from overlap_spec.messages import MOST_UNDRAFTED, GuessReport, StepCosts, StepResult
from overlap_spec.scheduler.width import WidthPolicy

WIDTHS = (1, 2, 4, 8, 12)
NARROW = (0.55, 0.57, 0.60, 0.67, 0.70)  # ms of a small model on a large GPU
RESTING = 0.47
ALWAYS = StepCosts((1, 8), WIDTHS, (NARROW, NARROW))
COSTS = StepCosts((1, 8), WIDTHS, (NARROW, NARROW), (RESTING, RESTING))


class Engine:
    """Plays steps, two in flight."""

    def __init__(self, costs: StepCosts, num_slots: int) -> None:
        self.policy = MeasuredWidth(costs, MatchedTokens(costs.widths))
        self.rested: list[bool] = []
        self._num_slots = num_slots
        self._table = StepSeconds(costs.batch_sizes, costs.seconds)
        self._flight: list[StepResult] = []
        self._drafted = True

    def speed(self, kind: str, num_tokens: int) -> float:
        """Tokens in the time of a step at rest, per slot."""
        texts = [Text(kind, seed) for seed in range(self._num_slots)]
        tokens, seconds = 0.0, 0.0
        while tokens < num_tokens:
            width = self.policy.choose(self._num_slots)
            tokens += self._judge(texts, width) / self._num_slots
            self._drafted = self.policy.drafts()
            assert self._drafted or width == 1
            self.rested.append(not self._drafted)
            seconds += self._table.of(8)[WIDTHS.index(width)] if self._drafted else RESTING
        return tokens * RESTING / seconds

    def _judge(self, texts: list[Text], width: int) -> int:
        """Returns how many tokens are committed."""
        runs, levels, strengths, next_columns = [], [], [], []
        for text in texts:
            stretch, right = text.window()
            run = 1 + min(right, width - 1) * self._drafted
            text.position += run
            runs.append(run)
            levels.append(stretch.levels if self._drafted else -1)
            strengths.append(stretch.strength)
            next_columns.append(run if self._drafted and right >= run else 0)
        lookahead = (GuessReport(levels, strengths, next_columns),) if any(levels) else ()
        proposed = [max(min(level, width - 1), 0) for level in levels]
        self._flight.append(StepResult(0, [[7] * run for run in runs], proposed, 0.0, extensions=lookahead))
        if len(self._flight) == 2:
            self.policy.observe(self._flight.pop(0))
        return sum(runs)


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("text", ["nothing is found", "what is found is wrong", "chat"])
def test_a_text_without_matches_is_decoded_as_fast_as_without_lookups(text: str, num_slots: int) -> None:
    resting, always = Engine(COSTS, num_slots), Engine(ALWAYS, num_slots)
    assert resting.speed(text, 3000) > 0.98
    assert always.speed(text, 1000) < 0.98, "and would be slower with them"


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("before", ["nothing is found", "what is found is wrong", "chat"])
def test_copies_are_found_at_once_whatever_came_before(before: str, num_slots: int) -> None:
    resting, always = Engine(COSTS, num_slots), Engine(ALWAYS, num_slots)
    for engine in (resting, always):
        engine.speed(before, 1000)
    begin = len(resting.rested)
    assert resting.speed("copy", 5000) > 0.97 * always.speed("copy", 5000) > 2.5
    assert sum(resting.rested[begin:]) < 0.06 * len(resting.rested[begin:])


def test_a_request_that_copies_is_as_fast_as_with_whole_windows() -> None:
    """Steps are planned before a match is known: one that ends is followed by another one soon."""
    adaptive, fixed = Engine(COSTS, 1), Engine(COSTS, 1)
    fixed.policy = WidthPolicy(WIDTHS[-1])  # type: ignore[assignment]  # another policy in its place
    assert adaptive.speed("copy", 5000) > 0.98 * fixed.speed("copy", 5000) > 2.5


def test_a_wide_step_follows_a_lookup() -> None:
    """There is a match in each window that is looked up, and for a while none was: lookups are not paid for."""
    policy, looked = MeasuredWidth(COSTS, MatchedTokens(COSTS.widths)), True
    for step in range(400):
        width, looked_before = policy.choose(1), looked
        assert looked_before or width == 1
        looked = policy.drafts()
        levels = (11 if step > 200 else 0) if looked_before else -1
        policy.observe(StepResult(0, [[7]], [0], 0.0, extensions=(GuessReport([levels], [12], [levels > 0]),)))


def test_it_never_rests_longer_than_is_made_up_for() -> None:
    engine, longest, now = Engine(COSTS, 1), 0, 0
    for text in ("copy", "what is found is wrong", "chat", "nothing is found"):
        engine.speed(text, 1000)
    for rested in engine.rested:
        now = now + 1 if rested else 0
        longest = max(longest, now)
    assert MOST_UNDRAFTED / 2 < longest < MOST_UNDRAFTED


def test_it_never_rests_where_the_cost_of_that_is_not_known() -> None:
    engine = Engine(ALWAYS, 8)
    engine.speed("nothing is found", 500)
    assert not any(engine.rested)


def test_what_some_gain_pays_for_all() -> None:
    """One of eight requests wants guesses, and its next one is always right: lookups cost the batch more than that."""
    policy, looked = MeasuredWidth(COSTS, MatchedTokens(COSTS.widths)), 0
    for _ in range(1000):
        width = policy.choose(8, 7)
        looked += policy.drafts()
        run = [7] * (1 + (width > 1))
        policy.observe(StepResult(0, [run], [1], 0.0, extensions=(GuessReport([1], [9], [1]),)))
    assert looked < 150
