"""The prompts of `overlap-spec verify`: a file with one JSON object in each line, of the names that `/generate` has.

    {"messages": [{"role": "user", "content": "Why?"}], "sampling_params": {"temperature": 0.8, "max_new_tokens": 64}}

A field that is not known is refused: a parameter that was misspelt would prove nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.entrypoints.cli.flags import UsageError
from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED, Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import convert, without_nulls
from overlap_spec.entrypoints.http.request_runner import renamed
from overlap_spec.entrypoints.native.generate import SAMPLING, NativeSampling, read_sampling
from overlap_spec.entrypoints.openai.prompts import check_chat, read_ids, read_text
from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt, Prompt, SamplingParams
from overlap_spec.version import __version__

SHIPPED = Path(__file__).parents[2] / "data" / "prompts" / "verify10.jsonl"
PROMPTS = ("text", "messages", "input_ids")


class Line(msgspec.Struct, kw_only=True):
    """One line. It has one of `text`, `messages` and `input_ids`."""

    text: str | None = None
    messages: list[Json] | None = None
    input_ids: list[int] | None = None
    sampling_params: Json = {}


class BadLine(UsageError):
    """A line cannot be run. The message names file, line and field."""

    def __init__(self, where: str, error: Problem | RequestError) -> None:
        name, text = error.param if isinstance(error, Problem) else error.field, str(error)
        super().__init__(f"{where}: {text if not name or text.startswith(name) else f'{name}: {text}'}")


@dataclass(frozen=True)
class VerifyPrompt:
    """One prompt. `where`: its file and line; `given`: its sampling parameters as they were written."""

    where: str
    kind: str  # the field that has the prompt
    prompt: Prompt
    sampling: SamplingParams
    given: dict[str, Any] = field(default_factory=dict)

    def refused(self, error: RequestError) -> BadLine:
        """What to say if the engine does not take the request."""
        return BadLine(self.where, renamed(error, {"prompt": self.kind}))


def read_prompt_file(path: Path, skip_tokenizer_init: bool = False) -> list[VerifyPrompt]:
    """Read and check all lines but empty ones. Raises: UsageError naming the line and the field."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    info = _what_is_known(skip_tokenizer_init)
    prompts = [_read(line, f"{path}, line {number}", info) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path}: has no prompts")
    return prompts


def _what_is_known(skip_tokenizer_init: bool) -> ServerInfo:
    """What checks need to know before an engine has started, which itself checks lengths and the vocabulary."""
    return ServerInfo(
        model_name="",
        model_path="",
        tokenizer_path=None,
        max_model_len=1 << 31,
        max_running_requests=0,
        version=__version__,
        skip_tokenizer_init=skip_tokenizer_init,
    )


def _read(line: bytes, where: str, info: ServerInfo) -> VerifyPrompt:
    try:
        fields = msgspec.json.decode(line, type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not a JSON object: {error}") from None
    try:
        return _checked(fields, where, info)
    except (Problem, RequestError) as error:
        raise BadLine(where, error) from None


def _checked(fields: Json, where: str, info: ServerInfo) -> VerifyPrompt:
    for name in fields.keys() - set(Line.__struct_fields__):
        hint = "belongs in sampling_params" if name in SAMPLING else f"not one of {', '.join(Line.__struct_fields__)}"
        raise Problem(400, f"{name}: {hint}", name)
    line = convert(without_nulls(fields), Line)
    given = [name for name in PROMPTS if getattr(line, name) is not None]
    if len(given) != 1:
        raise Problem(400, f"give one of {', '.join(PROMPTS)}, got {' and '.join(given) or 'none'}", "text")
    return VerifyPrompt(where, given[0], _prompt(line, info), _sampling(line, info), line.sampling_params)


def _prompt(line: Line, info: ServerInfo) -> Prompt:
    if line.messages is not None:
        return check_chat(ChatPrompt(line.messages), info)
    if line.text is not None:
        return read_text(line.text, "text", info)
    return read_ids(line.input_ids, "input_ids", info)


def _sampling(line: Line, info: ServerInfo) -> SamplingParams:
    n, sampling, _ = read_sampling(line.sampling_params, info)
    if n != 1:
        raise Problem(400, f"n: one answer is verified for each line, got {n}; write the line {n} times", "n")
    for name in line.sampling_params.keys() - set(NativeSampling.__struct_fields__) - set(UNSUPPORTED):
        raise Problem(400, f"{name}: not a parameter of /generate's sampling_params", name)
    return sampling
