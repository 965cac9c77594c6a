"""The `anthropic` package: messages, whole and streamed, tools, structured output, counts and errors."""

import anthropic
from checks import arguments, run_checks

URL, MODEL = arguments()
API = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TURNS = [{"role": "user", "content": "Name the capital of France."}]
CITY = {"type": "string", "enum": ["Paris", "Oslo"]}
GREEDY = {"extra_body": {"temperature": 0}}  # the package has dropped the parameter, the API has not
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
ONE = {"type": "any", "disable_parallel_tool_use": True}
WEATHER = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}


def whole_and_streamed_are_equal() -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 12, **GREEDY, "system": "Be short."}
    whole = API.messages.create(**asked)
    with API.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text and text
    assert whole.stop_reason == final.stop_reason
    assert whole.usage.output_tokens == final.usage.output_tokens > 0


def stop_sequences() -> None:
    text = API.messages.create(model=MODEL, messages=TURNS, max_tokens=12, **GREEDY).content[0].text
    word = text.split()[1]
    answer = API.messages.create(model=MODEL, messages=TURNS, max_tokens=12, **GREEDY, stop_sequences=[word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)


def system_turns_within_messages() -> None:
    turns = [*TURNS, {"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Now."}]
    assert API.messages.create(model=MODEL, messages=turns, max_tokens=4).content


def prefill() -> None:
    turns = [*TURNS, {"role": "assistant", "content": "The capital of France is"}]
    answer = API.messages.create(model=MODEL, messages=turns, max_tokens=4, **GREEDY)
    assert "Paris" in answer.content[0].text, answer


def forced_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = API.messages.create(
            model=MODEL, messages=TURNS, max_tokens=60, tools=[WEATHER], tool_choice=choice, **GREEDY
        )
        (block,) = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use" and block.input["city"] in ("Paris", "Oslo")


def forced_tool_streamed_and_its_result() -> None:
    asked = {"model": MODEL, "max_tokens": 60, "tools": [WEATHER]}
    with API.messages.stream(**asked, messages=TURNS, tool_choice=ONE) as stream:
        final = stream.get_final_message()
    (block,) = [block for block in final.content if block.type == "tool_use"]
    assert block.input["city"] in ("Paris", "Oslo")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "snow"}
    turns = [*TURNS, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    assert API.messages.create(**asked, messages=turns).usage.output_tokens


def structured_output() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = API.messages.create(model=MODEL, messages=TURNS, max_tokens=60, output_config=config, **GREEDY)
    assert '"city"' in answer.content[0].text


def counted_tokens_are_those_of_the_prompt() -> None:
    count = API.messages.count_tokens(model=MODEL, messages=TURNS, system="Be short.").input_tokens
    usage = API.messages.create(model=MODEL, messages=TURNS, system="Be short.", max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def errors_are_anthropics() -> None:
    try:
        API.messages.create(model=MODEL, messages=TURNS, max_tokens=0)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error" and "max_tokens" in str(error)
    try:
        API.messages.create(model="other", messages=TURNS, max_tokens=1)
    except anthropic.NotFoundError as error:
        assert error.body["type"] == "error"


CHECKS = (
    whole_and_streamed_are_equal,
    stop_sequences,
    system_turns_within_messages,
    prefill,
    forced_tool,
    forced_tool_streamed_and_its_result,
    structured_output,
    counted_tokens_are_those_of_the_prompt,
    errors_are_anthropics,
)
if __name__ == "__main__":
    run_checks({check.__name__: check for check in CHECKS}, ("anthropic",))
