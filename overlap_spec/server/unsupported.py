"""The parameters of OpenAI's, SGLang's and vLLM's APIs that are known here and not built.

A parameter of this table is refused with a 400 that names it, unless its value has no effect: none is ignored silently.
"""

import json
from typing import Any

from overlap_spec.server.bodies import Json
from overlap_spec.server.problems import Problem

# Field -> the values without an effect. Null never has one, and neither has a list of such values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # how tokens are drawn
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "guided_decoding": ({},),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": ("",),
    # what came before tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    # what is returned. OpenAI's completions take `logprobs: 0` for "the drawn token's", which is not nothing.
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "logprob_start_len": (-1, 0),
    "return_text_in_logprobs": (False, True),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_budget": (),
    "max_thinking_tokens": (),
    # what goes in
    "suffix": ("",),
    "stop_regex": ("", []),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "input_embeds": (),
    "prompt_embeds": (),
    "image_data": ([], ""),
    "audio_data": ([], ""),
    "video_data": ([], ""),
    "modalities": (["text"], []),
    "audio": ({},),
    "prediction": ({},),
    "web_search_options": (),
    "lora_path": ("",),
    "session_params": ({},),
    # scheduling and caching
    "priority": (0,),
    "extra_key": ("",),
    "cache_salt": ("",),
    "kv_transfer_params": ({},),
}


def refuse_unsupported(fields: Json) -> None:
    """Raise a Problem for the first parameter whose value asks for something that is not built."""
    for name, value in fields.items():
        neutral = UNSUPPORTED.get(name)
        if neutral is None or _asks_for_nothing(value, neutral):
            continue
        hint = f" or send {json.dumps(_suggested(value, neutral))}" if neutral else ""
        raise Problem(400, f"{name} is not supported: leave it out{hint}", name, "unsupported_parameter")


def _suggested(value: Any, neutral: tuple[Any, ...]) -> Any:
    """What to send instead; null where a switch's `false` would not be of the type that the API has."""
    return None if neutral[0] is False and not isinstance(value, bool) else neutral[0]


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or any(_same(value, candidate) for candidate in neutral):
        return True
    return isinstance(value, list) and bool(value) and all(_asks_for_nothing(item, neutral) for item in value)


def _same(value: Any, other: Any) -> bool:
    """Equality without Python's `True == 1`."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
