"""The parameters of OpenAI's, SGLang's and vLLM's APIs that are known here and not built, each with the reason.

A parameter of this table is refused with a 400 that names it, unless its value has no effect: none is ignored silently.
"""

import json
from collections.abc import Mapping
from typing import Any

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.json_bodies import Json

Neutral = tuple[Any, ...]  # the values without an effect; null never has one, and neither has a list of such values

REFUSED: dict[str, dict[str, Neutral]] = {  # why -> field -> neutral values
    "beam search is not built": {"use_beam_search": (False,), "beam_width": (1,), "length_penalty": (1,)},
    "text is continued at its end, not filled in": {"suffix": ("",)},
    "models read and write text alone": {
        "image_data": ([], ""),
        "audio_data": ([], ""),
        "video_data": ([], ""),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "modalities": (["text"], []),
        "audio": ({},),
    },
    "adapters are not built": {"lora_path": ("",)},
    "a prompt is text or token ids": {"input_embeds": (), "prompt_embeds": ()},
    "a request brings no code into the server": {
        "custom_logit_processor": ("",),
        "custom_params": ({},),
        "logits_processors": ([],),
        "vllm_xargs": ({},),
    },
    "answers are neither marked nor judged": {
        "watermark": ({},),
        "watermarking": (False,),
        "repetition_detection": ({},),
        "moderation": ({},),
    },
    "only tokens and their log-probs leave the device": {
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_entropy": (False,),
        "return_sampling_mask": (False,),
    },
    "log-probs of chosen tokens are /generate's token_ids_logprob": {"logprob_token_ids": ([],)},
    "tools and tool_choice have replaced it": {"functions": ([],), "function_call": ("none", "auto")},
    "guesses are made by the method that is loaded": {"prediction": ({},)},
    "nothing is stored or looked up for a request": {
        "store": (False,),
        "web_search_options": (),
        "session_params": ({},),
    },
    "clients take turns, whatever their requests say": {"priority": (0,), "service_tier": ("auto", "default")},
    "all requests share the prefix cache of one node": {
        "extra_key": ("",),
        "cache_salt": ("",),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    },
    "tokens are sent as soon as they are known": {"stream_interval": (1,)},
    "the end of a long prompt is what is kept": {"truncation_side": ("left",)},
    "no model here has such a setting": {"verbosity": ("medium",)},
}
UNSUPPORTED = {name: neutral for fields in REFUSED.values() for name, neutral in fields.items()}
REASONS = {name: reason for reason, fields in REFUSED.items() for name in fields}

# Parameters of other endpoints: of chats, where a prompt is none; of completions, elsewhere; and of OpenAI's API, in
# `/generate`.
OF_CHATS: dict[str, Neutral] = {"continue_final_message": (False,), "chat_template": ("",), "documents": ([],)}
OF_COMPLETIONS: dict[str, Neutral] = {"best_of": (1,)}
OF_OPENAI: dict[str, Neutral] = {"return_token_ids": (False,), "add_special_tokens": (True,)}


def refuse_unsupported(fields: Json, table: Mapping[str, Neutral] = UNSUPPORTED) -> None:
    """Raise a Problem for the first parameter whose value asks for something that is not built, or not here."""
    for name, value in fields.items():
        neutral = table.get(name)
        if neutral is None or _asks_for_nothing(value, neutral):
            continue
        why = f": {REASONS[name]}" if table is UNSUPPORTED else " at this endpoint"
        hint = f" or send {json.dumps(_suggested(value, neutral))}" if neutral else ""
        raise Problem(400, f"{name} is not supported{why}. Leave it out{hint}", name, "unsupported_parameter")


def _suggested(value: Any, neutral: Neutral) -> Any:
    """What to send instead; null where a switch's `false` would not be of the type that the API has."""
    return None if neutral[0] is False and not isinstance(value, bool) else neutral[0]


def _asks_for_nothing(value: Any, neutral: Neutral) -> bool:
    if value is None or any(_same(value, candidate) for candidate in neutral):
        return True
    return isinstance(value, list) and bool(value) and all(_asks_for_nothing(item, neutral) for item in value)


def _same(value: Any, other: Any) -> bool:
    """Equality without Python's `True == 1`."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
