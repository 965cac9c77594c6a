"""Why tests of others do not pass, where it is not the server that is wrong: by suite, a pattern of names and a reason.

A test that fails and is not here counts as failed. One that is here and passes counts as passed.
"""

Reasons = dict[str, str]  # a pattern of `fnmatch` -> why

STORED = "nothing is stored: no finished chat is listed, looked up, changed or deleted"
OPENAI: Reasons = {
    "*test_completions.py::*_with_all_params_overload_*": (
        "every parameter at once, with values for a server that reads none: audio, or a suffix, a bias of the token "
        "'foo' and best_of 0"
    ),
    **{f"*test_completions.py::*_{verb}*": STORED for verb in ("retrieve", "update", "list", "delete")},
    "*test_messages.py::*": STORED,
    "*test_models.py::*_delete*": "a model is not deleted by a request",
}
UNKNOWN = "the model, of 135 million parameters, does not know the answers that are looked for"
ENDLESS = "the model repeats itself until max_tokens, so there is no end to find; the text keeps to the grammar so far"
SGLANG: Reasons = {
    "*::test_basic_math": UNKNOWN,
    "*::test_color_completion": UNKNOWN,
    "*::test_concurrent_requests": UNKNOWN,
    "*::test_json_generate": ENDLESS,
    "*::test_mix_json_and_other": ENDLESS,
    "*::test_finish_stop_str": "the model writes 1,000 tokens without the new line that is to stop it",
    "*::test_count_tokens_with_system": "the model's template has a longer system message where none is given",
    "*::test_tool_result_image_content_conversion": "of two classes of sglang, not of a server",
    "*::test_long_prompt": "8,000 tokens of prompt take longer than its 120 seconds on two cores",
    "*::test_waiting_timeout": "for a server with SGLANG_REQ_WAITING_TIMEOUT; no time limit of waiting is built",
    "*::test_fwd_occupancy": "for a GPU with SGLANG_ENABLE_METRICS_DEVICE_TIMER",
    "*::test_pause_resume_in_place": "/pause_generation is not built",
    "*::test_prefix_cache_branching": "for a cache of 64-token chunks; here a prefix is found again page by page",
}
REASONS = {"openai_sdist": OPENAI, "sglang_kits": SGLANG}
