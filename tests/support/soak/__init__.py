"""A server under load and faults: what `tests/soak` runs."""
