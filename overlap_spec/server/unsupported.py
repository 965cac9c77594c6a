"""The parameters of OpenAI's, SGLang's and vLLM's APIs that are known here and not built.

A parameter of this table is refused with a 400 that names it, unless its value has no effect: none is ignored silently.
"""

import json
from collections.abc import Mapping
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
    # what is returned
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "stream_interval": (1,),
    # what goes in
    "suffix": ("",),
    "truncation_side": ("left",),
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
    # the provider's side of OpenAI's API
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    # scheduling and caching
    "priority": (0,),
    "extra_key": ("",),
    "cache_salt": ("",),
    "kv_transfer_params": ({},),
}

# Parameters of other endpoints: of chats, where a prompt is none; of completions, elsewhere; and of OpenAI's API, in
# `/generate`.
OF_CHATS: dict[str, tuple[Any, ...]] = {"continue_final_message": (False,), "chat_template": ("",)}
OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,)}
OF_OPENAI: dict[str, tuple[Any, ...]] = {"return_token_ids": (False,), "add_special_tokens": (True,)}


def refuse_unsupported(fields: Json, table: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> None:
    """Raise a Problem for the first parameter whose value asks for something that is not built, or not here."""
    where = "" if table is UNSUPPORTED else " at this endpoint"
    for name, value in fields.items():
        neutral = table.get(name)
        if neutral is None or _asks_for_nothing(value, neutral):
            continue
        hint = f" or send {json.dumps(_suggested(value, neutral))}" if neutral else ""
        raise Problem(400, f"{name} is not supported{where}: leave it out{hint}", name, "unsupported_parameter")


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
