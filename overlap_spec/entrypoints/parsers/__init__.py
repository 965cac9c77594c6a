"""Reads tool calls and reasoning out of the text of answers, while it grows."""
