"""Widths of decode steps by what they are seen to commit and to take, or by the rules of a file."""
