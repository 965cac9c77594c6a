"""Processes and the machine they run on: actors, their supervisor, traces, figures that are measured once."""
