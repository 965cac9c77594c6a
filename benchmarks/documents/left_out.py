"""Speeds of `bench methods` that a report names as not to be believed. They stay in the file, and are shown nowhere.

`left_out` of a report is a list of [label of the method, prompts, batch size]; its `note` says why.
"""

from overlap_spec.bench.methods_records import Report


def is_left_out(report: Report, entry: Report, figures: Report) -> bool:
    """Whether the speed of these figures of a method is left out."""
    return [entry["label"], figures["prompts"], figures["batch"]] in report.get("left_out", [])
