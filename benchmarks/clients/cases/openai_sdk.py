"""The `openai` package: chats, completions and responses, whole and streamed, with all that it has helpers for."""

import json
from typing import Literal

import openai
from checks import arguments, run_checks
from pydantic import BaseModel

URL, MODEL = arguments()
API = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
TURNS = [{"role": "user", "content": "Name the capital of France."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Capital(BaseModel):
    city: Literal["Paris", "Oslo"]
    large: bool


def chat_whole_and_streamed_are_equal() -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 12, "temperature": 0}
    whole = API.chat.completions.create(**asked)
    chunks = list(API.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def stream_helper() -> None:
    with API.chat.completions.stream(model=MODEL, messages=TURNS, max_tokens=8, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content


def several_choices() -> None:
    answer = API.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=6, n=3, seed=5, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = API.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=6, seed=5, temperature=1)
    assert answer.choices[0].message.content == alone.choices[0].message.content


def chat_log_probs() -> None:
    answer = API.chat.completions.create(
        model=MODEL, messages=TURNS, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def completion_log_probs_with_echo() -> None:
    answer = API.completions.create(
        model=MODEL, prompt="The sky is", max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and all(value <= 0 for value in found.token_logprobs[1:])


def penalties_and_bias() -> None:
    answer = API.chat.completions.create(
        model=MODEL, messages=TURNS, max_tokens=6, frequency_penalty=1, presence_penalty=0.5, logit_bias={"5": -100}
    )
    assert answer.choices[0].message.content


def json_schema() -> None:
    answer = API.chat.completions.parse(
        model=MODEL, messages=TURNS, response_format=Capital, max_tokens=120, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Capital)


def required_tool() -> None:
    answer = API.chat.completions.create(
        model=MODEL, messages=TURNS, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=60
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def required_tool_streamed() -> None:
    chunks = list(
        API.chat.completions.create(
            model=MODEL, messages=TURNS, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, stream=True
        )
    )
    pieces = [piece for chunk in chunks for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == "get_weather"
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces))["city"] in ("Paris", "Oslo")


def a_tools_result_is_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    turns = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
    ]
    answer = API.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=4)
    assert answer.usage.completion_tokens


def response_whole_and_streamed_are_equal() -> None:
    asked = {"model": MODEL, "input": TURNS[0]["content"], "max_output_tokens": 16, "temperature": 0}
    whole = API.responses.create(**asked, store=False)
    with API.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and whole.output_text
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    chat = API.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=16, temperature=0)
    assert chat.choices[0].message.content == whole.output_text


def response_with_json_schema() -> None:
    answer = API.responses.parse(
        model=MODEL, input="France?", text_format=Capital, max_output_tokens=120, temperature=0
    )
    assert isinstance(answer.output_parsed, Capital)


def response_with_a_tool() -> None:
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    asked = {
        "model": MODEL,
        "input": "Weather in Oslo?",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = API.responses.create(**asked, max_output_tokens=60, temperature=0)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}
    turns = [{"role": "user", "content": "Weather in Oslo?"}, *answer.output, result]
    assert API.responses.create(model=MODEL, input=turns, tools=[tool], max_output_tokens=16).output


def storage_is_refused() -> None:
    for more in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
        try:
            API.responses.create(model=MODEL, input="hi", **more)
        except openai.BadRequestError as error:
            assert error.param == next(iter(more)) and "stored" in str(error)
        else:
            raise AssertionError(f"{more} is accepted")


def models() -> None:
    assert [model.id for model in API.models.list()] == [MODEL] and API.models.retrieve(MODEL).id == MODEL


CHECKS = (
    chat_whole_and_streamed_are_equal,
    stream_helper,
    several_choices,
    chat_log_probs,
    completion_log_probs_with_echo,
    penalties_and_bias,
    json_schema,
    required_tool,
    required_tool_streamed,
    a_tools_result_is_read,
    response_whole_and_streamed_are_equal,
    response_with_json_schema,
    response_with_a_tool,
    storage_is_refused,
    models,
)
if __name__ == "__main__":
    run_checks({check.__name__: check for check in CHECKS}, ("openai",))
