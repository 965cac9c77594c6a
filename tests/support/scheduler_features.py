"""Schedulers with the features that an engine attaches to its own."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from overlap_spec.config import AdaptSettings, AuditSettings
from overlap_spec.scheduler.build import attach_features
from overlap_spec.scheduler.loop import Scheduler
from support.fake_settings import fake_settings

if TYPE_CHECKING:
    from overlap_spec.features.audit.scheduler import Audits


def with_features(
    scheduler: Scheduler, audit: AuditSettings | None = None, adapt: AdaptSettings | None = None
) -> Scheduler:
    """Attach to the scheduler each feature whose folder exists. Returns the scheduler."""
    settings = fake_settings()
    settings = replace(settings, audit=audit or settings.audit, adapt=adapt or settings.adapt)
    attach_features(scheduler, settings)
    return scheduler


def audits_of(scheduler: Scheduler) -> "Audits":
    """Its audits. The worker keeps slots for them."""
    from overlap_spec.features.audit.scheduler import Audits

    audits = scheduler.hooks.by_name["audit"]
    assert isinstance(audits, Audits)
    return audits
