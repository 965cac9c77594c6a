"""Anthropic's Messages API, over chat completions."""
