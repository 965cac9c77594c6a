"""How often an engine recovers."""

from overlap_spec.config import RecoverySettings
from overlap_spec.errors import ActorDied
from overlap_spec.runtime.watchdog import RecoveryLimit

DEATH = ActorDied("worker", "was killed"), "scheduler and worker are"


def test_old_recoveries_are_forgotten_and_too_many_within_the_window_are_refused() -> None:
    now = 0.0
    limit = RecoveryLimit(clock=lambda: now)
    assert not limit.begin(*DEATH), "before the engine is ready there is nothing to recover"
    limit.settings = RecoverySettings(enabled=True, most=2, window_s=10.0)
    begun = []
    for now in (0.0, 4.0, 9.0, 10.5, 11.0, 14.5):  # noqa: B007 - the clock reads it
        begun.append(limit.begin(*DEATH))
        limit.end()
    assert begun == [True, True, False, True, False, True]


def test_a_recovery_that_meets_another_death_began_with_the_first() -> None:
    now = 1.0
    limit = RecoveryLimit(clock=lambda: now)
    limit.settings = RecoverySettings(enabled=True)
    assert limit.begin(*DEATH)
    now = 2.0
    assert limit.begin(ActorDied("scheduler", "too"), "both are") and limit.died_at == 1.0
    limit.end()
    now = 3.0
    assert limit.begin(*DEATH) and limit.died_at == 3.0
