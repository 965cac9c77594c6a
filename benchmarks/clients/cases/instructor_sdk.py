"""`instructor`: validated objects through each of the ways in which it asks for them."""

from typing import Literal

import instructor
from checks import arguments, run_checks
from openai import OpenAI
from pydantic import BaseModel

URL, MODEL = arguments()
API = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Person(BaseModel, extra="forbid"):
    name: Literal["Ann", "Bob"]
    adult: bool


def extract(mode: instructor.Mode) -> None:
    client = instructor.from_openai(API, mode=mode)
    turns = [{"role": "user", "content": "Ann is 31 years old."}]
    person = client.chat.completions.create(
        model=MODEL, response_model=Person, messages=turns, max_tokens=200, temperature=0, max_retries=0
    )
    assert isinstance(person, Person)


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT)
if __name__ == "__main__":
    checks = {mode.name.lower(): lambda mode=mode: extract(mode) for mode in MODES}
    run_checks(checks, ("instructor", "openai"))
