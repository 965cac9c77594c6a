"""From flags, files and machine to settings: `resolve`, pure; a file for each subject."""

from overlap_spec.config.resolve.resolve import SPIN_CORES, SPIN_S, resolve, settled_flags, without_speculation

__all__ = ["SPIN_CORES", "SPIN_S", "resolve", "settled_flags", "without_speculation"]
