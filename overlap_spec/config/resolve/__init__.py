"""`resolve` computes the settings from flags, files and machine. It is pure; each subject has a module."""

from overlap_spec.config.ranks import SPIN_CORES, SPIN_S
from overlap_spec.config.resolve.resolve import http_limits, resolve, settled_flags, without_speculation
from overlap_spec.config.resolve.server import otlp_target

__all__ = ["SPIN_CORES", "SPIN_S", "http_limits", "otlp_target", "resolve", "settled_flags", "without_speculation"]
