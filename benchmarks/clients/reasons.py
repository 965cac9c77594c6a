"""Why tests of others do not pass, where it is not our server that is wrong: by suite, a pattern of names and a reason.

A test that fails and is not here counts as failed. One that is here and passes counts as passed.
"""

Reasons = dict[str, str]  # a pattern of `fnmatch` -> why

OPENAI: Reasons = {}
SGLANG: Reasons = {}
REASONS = {"openai_sdist": OPENAI, "sglang_kits": SGLANG}
