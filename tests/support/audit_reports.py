"""Reports of the live audit."""

from overlap_spec.messages import AuditFigures, AuditReport

NOTHING_AUDITED = AuditReport(
    rate=0.01,
    action="log",
    why_off="",
    figures=AuditFigures(),
    near_ties_per_10k=0.0,
    control_per_10k=0.0,
    typical_noise=None,
    dropped_because={},
    skipped_because={},
    fault_file=None,
    faults_written=0,
    recent=[],
)
