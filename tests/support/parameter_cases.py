"""The parameters of the APIs, each with values that have an effect: the rows of the matrix in docs/correctness.md.

`tests/integration/test_parameter_matrix.py` sends every case through the HTTP server to every method at depth 1 and 2,
many requests in one batch. A reply must be what plain decoding replies to that request alone, field by field, but for
`VOLATILE`. That a case has an effect is checked as well: plain decoding's replies without its fields are others.

**To add a parameter**, add a row to `CASES`: its name in the API, and one case or several. A case is the endpoint, the
parameter's fields, and (`beside`) the fields that it needs, which are sent in both runs. Each body has the endpoint's
fields of `BODIES`, once with every prompt of `PROMPTS`, and then the case's. The fields of `/generate` are those of
`sampling_params`, unless `GenerateRequest` has them. If replies get a field that may differ with speculation, add it
to `VOLATILE`, and to `REPORTS` if a parameter of speculation changes it: such a case says `is_reported`. Another name
of the same parameter goes into `ALIASES`. What changes no whole reply goes into `OUTSIDE`, with the reason.

What is refused needs no row: each name of `entrypoints/http/body_fields.py` has one, by a test of the 400.
What is refused by its value, or at an endpoint, is a row of `REFUSED`.

Then write the results: `python -m pytest tests/integration/test_parameter_matrix.py -m "" --matrix
benchmarks/results/parameter_matrix.json`, and `python benchmarks/write_docs.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from overlap_spec.entrypoints.native.generate import OF_OPENAI, OTHER_NAMES, GenerateRequest
from overlap_spec.entrypoints.openai.requests import NAMES_HERE, OF_CHATS, OF_COMPLETIONS, THINKING_BUDGETS

Json = dict[str, Any]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROMPTS = ("the same the same", "of 12 and 12", "a")
NUM_TOKENS = 10
BOS, EOS, COMMA, LESS = "1", "2", "18", "34"  # ids of the tiny tokenizer, as keys of a logit_bias

BODIES: dict[str, Json] = {
    COMPLETIONS: {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    CHAT: {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    GENERATE: {"max_new_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    MESSAGES: {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    RESPONSES: {"max_output_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True},
}


@dataclass(frozen=True)
class Case:
    """One request with the parameter."""

    fields: Json
    endpoint: str = COMPLETIONS
    beside: Json = field(default_factory=dict)
    is_reported: bool = False  # the effect is in what a reply reports of its steps: no token may change

    def bodies(self, with_fields: bool = True) -> Iterator[Json]:
        """One for each prompt."""
        asked = BODIES[self.endpoint] | self.beside | (self.fields if with_fields else {})
        for prompt in PROMPTS:
            yield with_prompt(self.endpoint, prompt, asked)


_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}, "required": ["a"]}
_TAG = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<"]}
_ENDS = {"ignore_eos": False}  # a grammar ends its output by EOS
_TRIGGERS = {**_ENDS, "logit_bias": {LESS: 5}}
GRAMMARS: dict[str, tuple[Json, ...]] = {  # values by field
    "response_format": (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
        {"response_format": {"type": "structural_tag", **_TAG}},
    ),
    "json_schema": ({"json_schema": json.dumps(_SCHEMA)},),
    "regex": ({"regex": "[0-9]{2,4}"},),
    "ebnf": ({"ebnf": 'root ::= "ab" | "c" root'},),
    "lark": ({"lark": 'start: "a" /[b-d]+/'},),
    "structural_tag": ({"structural_tag": json.dumps(_TAG)},),
    "structured_outputs": tuple(
        {"structured_outputs": each} for each in ({"json": _SCHEMA}, {"choice": ["no", "yes"]})
    ),
    "guided_json": ({"guided_json": _SCHEMA},),
    "guided_regex": ({"guided_regex": "[a-c]{3}!"},),
    "guided_choice": ({"guided_choice": ["left", "right"]},),
    "guided_grammar": ({"guided_grammar": 'root ::= "x" [0-9]'},),
    "guided_json_object": ({"guided_json_object": True},),
    "guided_decoding": ({"guided_decoding": {"choice": ["up", "down"], "backend": "guidance"}},),
}
OF_GRAMMARS = {
    name: tuple(
        Case(fields, endpoint, _TRIGGERS if "structural_tag" in str(fields) else _ENDS)
        for fields in cases
        for endpoint in (COMPLETIONS, CHAT, GENERATE)
    )
    for name, cases in GRAMMARS.items()
}

CASES: dict[str, tuple[Case, ...]] = {
    **OF_GRAMMARS,
    "guided_whitespace_pattern": tuple(
        Case({"guided_whitespace_pattern": " {1,3}"}, endpoint, {**_ENDS, "guided_json": _SCHEMA})
        for endpoint in (COMPLETIONS, GENERATE)
    ),
    "max_tokens": (Case({"max_tokens": 7}), Case({"max_tokens": 1}, CHAT), Case({"max_new_tokens": 5}, GENERATE)),
    "min_tokens": (
        Case({"min_tokens": 6}, beside={"stop_token_ids": list(range(64, 96))}),
        Case({"min_new_tokens": 6}, GENERATE, {"stop_token_ids": list(range(64, 96)), "temperature": 0}),
    ),
    "temperature": (Case({"temperature": 0}), Case({"temperature": 1.7}), Case({"temperature": 0.3}, CHAT)),
    "top_k": (Case({"top_k": 2}), Case({"top_k": 1}, GENERATE)),
    "top_p": (Case({"top_p": 0.3}), Case({"top_p": 0.6}, CHAT)),
    "min_p": (Case({"min_p": 0.5}), Case({"min_p": 0.3, "top_k": 20})),
    "seed": (Case({"seed": -11}), Case({"seed": 2**62}, CHAT)),
    "stop": (Case({"stop": ["e", "1"]}), Case({"stop": list("abcdefgh")}, CHAT)),
    "stop_token_ids": (Case({"stop_token_ids": list(range(40, 72))}),),
    "ignore_eos": (Case({"ignore_eos": False}, beside={"logit_bias": {EOS: 6}}),),
    "skip_special_tokens": (Case({"skip_special_tokens": False}, beside={"logit_bias": {EOS: 6}}),),
    "no_stop_trim": (Case({"no_stop_trim": True}, beside={"stop": list("abcdefghijkl0123")}),),
    "best_of": (
        Case({"best_of": 4}),
        Case({"best_of": 3}, beside={"n": 2, "logprobs": 1}),
        Case({"best_of": 2}, beside={"echo": True, "temperature": 1.5}),
    ),
    "n": (Case({"n": 3}), Case({"n": 2}, CHAT), Case({"n": 2}, GENERATE)),
    "presence_penalty": (Case({"presence_penalty": 2}, beside={"temperature": 0}), Case({"presence_penalty": -2})),
    "frequency_penalty": (
        Case({"frequency_penalty": 2}, beside={"temperature": 0}),
        Case({"frequency_penalty": -1.5}, CHAT),
    ),
    "repetition_penalty": (
        Case({"repetition_penalty": 2}, beside={"temperature": 0}),
        Case({"repetition_penalty": 0.5}, GENERATE),
    ),
    "logprobs": (Case({"logprobs": 3}), Case({"logprobs": True}, CHAT)),
    "top_logprobs": (Case({"top_logprobs": 20}, CHAT, {"logprobs": True}),),
    "echo": (Case({"echo": True}), Case({"echo": True}, beside={"logprobs": 1})),
    "prompt_logprobs": (Case({"prompt_logprobs": 2}), Case({"prompt_logprobs": 0}, CHAT)),
    "return_tokens_as_token_ids": (Case({"return_tokens_as_token_ids": True}, beside={"logprobs": 2}),),
    "return_logprob": (Case({"return_logprob": True}, GENERATE),),
    "logprob_start_len": (Case({"logprob_start_len": 0}, GENERATE, {"return_logprob": True}),),
    "top_logprobs_num": (Case({"top_logprobs_num": 4}, GENERATE, {"return_logprob": True}),),
    "token_ids_logprob": (Case({"token_ids_logprob": [5, 90]}, GENERATE, {"return_logprob": True}),),
    "return_text_in_logprobs": (Case({"return_text_in_logprobs": True}, GENERATE, {"return_logprob": True}),),
}

CASES |= {
    "logit_bias": (
        Case({"logit_bias": {"75": 100}}, beside={"temperature": 0}),
        Case({"logit_bias": {str(token): -100 for token in range(0, 128, 2)}}, CHAT),
        Case({"logit_bias": {"90": 2.5, "91": 2.5}}, GENERATE),
    ),
    "allowed_token_ids": (
        Case({"allowed_token_ids": list(range(71, 91))}),
        Case({"allowed_token_ids": [80, 75], "logit_bias": {"75": 0.5}}, beside={"temperature": 0}),
    ),
    "stop_regex": (Case({"stop_regex": "[a-h]"}), Case({"stop_regex": ["[0-9]", "[a-f]"]}, CHAT)),
    "include_stop_str_in_output": (
        Case({"include_stop_str_in_output": True}, beside={"stop": list("abcdefghijkl0123")}),
    ),
    "truncate_prompt_tokens": (Case({"truncate_prompt_tokens": 1}, beside={"temperature": 0.1}),),
    "return_token_ids": (Case({"return_token_ids": True}),),
    "bad_words": (
        Case({"bad_words": [*"etaoinshrdlu", "no", " yes"]}, beside={"temperature": 0}),
        Case({"bad_words": ["ah"]}, beside={"allowed_token_ids": [71, 78], "temperature": 5}),  # a and h
    ),
}

SAID = "{{ messages[0]['content'] }}"
THINKS = SAID + "<think>"  # a template whose prompts end in the middle of reasoning
_THINKING = {"chat_template": THINKS, "max_tokens": 15}
_PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}, "required": ["a"]}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name in ("f", "go")]
_CALLS = {"tools": _TOOLS, "max_tokens": 24, **_ENDS}
_NAMED = {"type": "function", "function": {"name": "go"}}
_COUNTED = {"speculative": {"metrics": "summary"}}

OF_CONVERSATIONS: dict[str, Json] = {  # what becomes the prompt: fields, and those beside them
    "chat_template": {"chat_template": SAID},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
}
CASES |= {
    name: (Case(fields, CHAT), Case(fields, CHAT, {"temperature": 0})) for name, fields in OF_CONVERSATIONS.items()
}
CASES |= {
    "chat_template_kwargs": (Case({"chat_template_kwargs": {"a": "loud"}}, CHAT, {"chat_template": SAID + "{{ a }}"}),),
    "documents": (
        Case({"documents": [{"text": "far"}]}, CHAT, {"chat_template": SAID + "{{ documents[0].text if documents }}"}),
    ),
    "reasoning_effort": (Case({"reasoning_effort": "low"}, CHAT, {"chat_template": SAID + "{{ reasoning_effort }}"}),),
    "add_special_tokens": (Case({"add_special_tokens": False}),),
    "spaces_between_special_tokens": (
        Case(
            {"spaces_between_special_tokens": False},
            beside={"skip_special_tokens": False, "logit_bias": {BOS: 100, EOS: 100}},
        ),
    ),
    "thinking_budget": (
        Case({"thinking_budget": 3}, CHAT, _THINKING),
        Case({"thinking_budget": 0}, CHAT, {**_THINKING, "temperature": 0}),
    ),
    "max_thinking_tokens": (Case({"max_thinking_tokens": 5}, CHAT, _THINKING),),
    "thinking_token_budget": (Case({"thinking_token_budget": 1}, CHAT, _THINKING),),
    "separate_reasoning": (Case({"separate_reasoning": False}, CHAT, {**_THINKING, "thinking_budget": 4}),),
    "tools": (Case({"tools": _TOOLS}, CHAT, {"chat_template": SAID + "{{ tools is none }}"}),),
    "tool_choice": (Case({"tool_choice": "required"}, CHAT, _CALLS), Case({"tool_choice": _NAMED}, CHAT, _CALLS)),
    "parallel_tool_calls": (
        Case({"parallel_tool_calls": False}, CHAT, {**_CALLS, "tool_choice": "required", "logit_bias": {COMMA: 9}}),
    ),
    "speculative": (
        Case({"speculative": {"method": "none", "metrics": "summary"}}, beside=_COUNTED, is_reported=True),
        Case({"speculative": {"num_steps": 0, "metrics": "detailed"}}, CHAT, _COUNTED, is_reported=True),
        Case({"speculative": {"provenance": True}}, beside={"temperature": 0}, is_reported=True),
        Case({"speculative": {"num_steps": 0}}, GENERATE, is_reported=True),
    ),
    "return_spec_tokens_details": tuple(
        Case({"return_spec_tokens_details": True}, endpoint, is_reported=True)
        for endpoint in (COMPLETIONS, CHAT, GENERATE)
    ),
}

_FORMAT = {"type": "json_schema", "schema": _SCHEMA}
_THINKING_HERE = {"chat_template": THINKS, "max_output_tokens": 15, "logit_bias": {LESS: 1}}
CASES |= {  # of the APIs that are translated to chats
    "stop_sequences": (Case({"stop_sequences": list("abcdefgh")}, MESSAGES),),
    "system": (Case({"system": "be"}, MESSAGES),),
    "thinking": (Case({"thinking": {"type": "enabled", "budget_tokens": 2}}, MESSAGES, _THINKING),),
    "output_config": (Case({"output_config": {"format": _FORMAT}}, MESSAGES, _ENDS),),
    "max_output_tokens": (Case({"max_output_tokens": 6}, RESPONSES),),
    "instructions": (Case({"instructions": "be"}, RESPONSES),),
    "text": (Case({"text": {"format": {**_FORMAT, "name": "a"}}}, RESPONSES, _ENDS),),
    "reasoning": (
        Case({"reasoning": {"effort": "low"}}, RESPONSES, {"chat_template": "{{ reasoning_effort }}" + SAID}),
    ),
    "include": (Case({"include": ["reasoning.encrypted_content"]}, RESPONSES, _THINKING_HERE),),
}

# Other names of parameters with a row.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "bad_word_ids": "bad_words",
    "allowed_ids": "allowed_token_ids",  # packed
    "log_probs": "logprobs",
    "grammar": "response_format",  # whichever field asks for it
    "shown_tokens": "tools",
}

# Fields that are no parameters of a whole reply, and why.
OUTSIDE = {
    **dict.fromkeys(
        ("model", "rid", "request_id", "user", "metadata", "safety_identifier", "prompt_cache_key"), "names"
    ),
    **dict.fromkeys(("stream", "stream_options", "stream_reasoning"), "how a reply is sent"),
    **dict.fromkeys(("timeout", "first_token_timeout"), "how long a reply may take"),
    **dict.fromkeys(("prompt", "messages", "input", "input_ids", "sampling_params"), "what is asked"),
    **dict.fromkeys(("cache_control", "prompt_cache_retention", "prompt_cache_options"), "every prefix is cached"),
    **dict.fromkeys(("cache_salt", "extra_key"), "whose prefixes a request finds"),
    "adapt": "what a draft learns from later",
    **dict.fromkeys(("speed", "truncation", "guided_decoding_backend"), "one value is accepted"),
}

# Refused by the value, or at an endpoint: a row, whose first word is the field, and where what is sent.
REFUSED: dict[str, tuple[str, Json]] = {
    "best_of below n": (COMPLETIONS, {"n": 3, "best_of": 2}),
    "best_of in a stream": (COMPLETIONS, {"best_of": 3, "stream": True}),
    "logprobs true in completions": (COMPLETIONS, {"logprobs": True}),
    "top_logprobs without logprobs": (CHAT, {"top_logprobs": 2}),
    "prompt_logprobs in a stream": (CHAT, {"prompt_logprobs": 1, "stream": True}),
    "add_special_tokens in chats": (CHAT, {"add_special_tokens": True}),
    "continue_final_message with add_generation_prompt": (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
    ),
    "thinking_budget in completions": (COMPLETIONS, {"thinking_budget": 1}),
    **{f"{name} without a reasoning parser": (CHAT, {name: 1}) for name in THINKING_BUDGETS},
    "tool_choice without a tool call parser": (CHAT, {"tools": _TOOLS, "tool_choice": "required"}),
    **{f"{name} in completions": (COMPLETIONS, {name: "a"}) for name in OF_CHATS},
    **{f"{name} in chats": (CHAT, {name: "a"}) for name in OF_COMPLETIONS},
    **{f"{name} in /generate": (GENERATE, {name: "a"}) for name in (*OF_OPENAI, *OTHER_NAMES)},
    **{f"{name} in OpenAI's API": (CHAT, {name: 1}) for name in NAMES_HERE},
}

# Fields of replies that may differ: names, times, and what speculation and the cache did.
REPORTS = frozenset(
    (
        "metrics",
        "provenance",
        "sglext",
        "spec_accept_length",
        "spec_accept_rate",
        "spec_correct_drafts_histogram",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_verify_ct",
        "speculative_decoding",
    )
)
VOLATILE = REPORTS | {
    *("id", "call_id", "created", "created_at", "completed_at", "e2e_latency"),
    *("cached_tokens", "prompt_tokens_details"),
    *("input_tokens", "input_tokens_details", "cache_read_input_tokens"),  # Anthropic's are those not in the cache
    "output_tokens_details",  # its reasoning_tokens are exact to a step, and several steps may come as one
}


def comparable(reply: Any) -> Any:
    """A reply without what may differ, its numbers rounded: batches of other shapes differ in the last bits."""
    if isinstance(reply, float):
        return round(reply, 9)
    if isinstance(reply, dict):
        return {name: comparable(value) for name, value in reply.items() if name not in VOLATILE}
    return [comparable(value) for value in reply] if isinstance(reply, list) else reply


def reported(reply: Any) -> Any:
    """What a reply reports of its steps."""
    if isinstance(reply, list):
        return [reported(value) for value in reply]
    if not isinstance(reply, dict):
        return None
    inner = {name: value if name in REPORTS else reported(value) for name, value in reply.items()}
    return {name: value for name, value in inner.items() if value}


def with_prompt(endpoint: str, prompt: str, fields: Json) -> Json:
    """A body."""
    if endpoint == COMPLETIONS:
        return {"prompt": prompt, **fields}
    if endpoint == RESPONSES:
        return {"input": prompt, **fields}
    if endpoint in (CHAT, MESSAGES):
        return {"messages": [{"role": "user", "content": prompt}], **fields}
    own = {name: value for name, value in fields.items() if name in GenerateRequest.__struct_fields__}
    sampling = {name: value for name, value in fields.items() if name not in own}
    return {"text": prompt, **own, "sampling_params": sampling}
