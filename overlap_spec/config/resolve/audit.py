"""Resolves the flags of the live audit."""

from overlap_spec.config import AuditSettings, EngineConfig, SpecSettings
from overlap_spec.errors import ConfigError

DEFAULT_RATE = 0.01


def resolve_audit(config: EngineConfig, spec: SpecSettings) -> AuditSettings:
    """Audits are on where speculation is, unless its tokens are not plain decoding's. Raises: ConfigError."""
    why_not = _why_not(spec)
    rate = config.audit_rate
    if rate is None:
        rate = DEFAULT_RATE if spec.width > 1 and not why_not else 0.0
    elif rate > 0 and why_not:
        raise ConfigError("audit_rate", f"{why_not}: there is nothing to compare tokens with; use 0")
    if rate == 0:
        for field, given in (("audit_action", config.audit_action != "log"), ("audit_file", config.audit_file)):
            if given:
                raise ConfigError(field, "has no effect without audits; leave it out, or give --audit-rate")
    return AuditSettings(rate, config.audit_action, config.audit_file)


def _why_not(spec: SpecSettings) -> str:
    if spec.simulated_accept_lens:
        return "acceptance is synthetic"
    if spec.accept.asked_by is not None:
        return f"{spec.accept.asked_by} commits other tokens than plain decoding"
    return ""
