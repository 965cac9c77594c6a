"""`langchain-openai`: invoke, stream, structured output and bound tools."""

from typing import Literal

from checks import arguments, run_checks
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = arguments()
CHAT = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=120, max_retries=0)


class Capital(BaseModel):
    """A country's capital."""

    city: Literal["Paris", "Oslo"]
    large: bool


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"snow in {city}"


def invoke_and_stream_are_equal() -> None:
    whole = CHAT.invoke("Name the capital of France.")
    assert whole.content == "".join(chunk.content for chunk in CHAT.stream("Name the capital of France."))
    assert whole.usage_metadata["output_tokens"]


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(CHAT.with_structured_output(Capital, method=method).invoke("France?"), Capital), method


def bound_tools_and_their_results() -> None:
    bound = CHAT.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    asked = HumanMessage("How is the weather in Oslo?")
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Oslo")
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert CHAT.bind_tools([weather]).invoke([asked, answer, result]).response_metadata["finish_reason"]


def responses_api() -> None:
    chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, use_responses_api=True, max_tokens=16)
    assert chat.invoke("Hi").text


CHECKS = (invoke_and_stream_are_equal, structured_output, bound_tools_and_their_results, responses_api)
if __name__ == "__main__":
    run_checks({check.__name__: check for check in CHECKS}, ("langchain-openai", "langchain-core", "openai"))
