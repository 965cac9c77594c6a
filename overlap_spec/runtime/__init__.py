"""Processes and the machine they run on: actors, their supervisor, traces, what is measured once."""
