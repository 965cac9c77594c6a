"""The width of decode steps: policies, and what they learn from results."""
