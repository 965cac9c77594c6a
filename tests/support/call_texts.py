"""Texts with calls of every format that parsers read, what they mean, and texts that are no calls."""

from typing import Any

from overlap_spec.entrypoints.parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START
from overlap_spec.entrypoints.parsers.sections import DEEPSEEK, KIMI

ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo", "days": [1, 2.5e3, {"deep": null}]}'
TRICKY = '{"city": "\\u0052 \\"</tool_call>[TOOL_CALLS]}]\\\\", "to": "é\U0001f999"}'
CALL_HEAD = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
Calls = list[tuple[str, str]]
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = DEEPSEEK.all
KIMI_BEGIN, KIMI_CALL, KIMI_ARGUMENT, KIMI_CALL_END, KIMI_END = KIMI.all


def fenced(name: str, arguments: str) -> str:
    """A call of DeepSeek-V3."""
    return f"{CALL_BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def plain(name: str, arguments: str) -> str:
    """A call of DeepSeek-V3.1."""
    return f"{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}"


def numbered(name: str, arguments: str) -> str:
    """A call of Kimi K2."""
    return f"{KIMI_CALL}{name}{KIMI_ARGUMENT}{arguments}{KIMI_CALL_END}"


def tagged(name: str, arguments: dict[str, str], gap: str = "\n") -> str:
    """A call of GLM-4.5; without a gap, of GLM-4.7."""
    pairs = (f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}" for key, value in arguments.items())
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


def element(name: str, arguments: dict[str, str]) -> str:
    """A call of Qwen3-Coder."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def bare(name: str, arguments: str) -> str:
    """A call of Gemma 4, whose strings are written as JSON here."""
    return f"<|tool_call>call:{name}{arguments}<tool_call|>".replace('"', '<|"|>')


DAYS = '{city:"Rome",days:[1,2.5e3,{deep:null}],e:{}}'
MIXED = {"city": "Rome", "note": 'a "</b>"\n\\', "days": " [1, 2.5e3]\n", "to": '{"é": "</arg_value>"}', "dry": "true"}
MIXED_JSON = (
    '{"city": "Rome", "note": "a \\"</b>\\"\\n\\\\", "days": [1, 2.5e3], "to": {"é": "</arg_value>"}, "dry": true}'
)
SCHEMAS: dict[str, Any] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "zip": {"$ref": "#/$defs/zip"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer"},
        },
        "$defs": {"zip": {"anyOf": [{"type": ["string"]}, {"const": "none"}]}},
    },
    "clock": {},
}

# format, text, content, calls
GOOD: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        f'On it.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n<tool_call>'
        f'{{"arguments":{OSLO},"name":"clock"}}</tool_call>',
        "On it.",
        [("weather", ROME), ("clock", OSLO)],
    ),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {TRICKY}}}</tool_call> ok?', " ok?", [("f", TRICKY)]),
    ("hermes", f'<tool_call>{{"name": "f", "parameters": {ROME}, "id": 7}}', "", [("f", ROME)]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}\n</tool', "", [("f", "{}")]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {ROME}}} so', " so", [("f", ROME)]),
    ("hermes", "1 < 2, <tool, </tool_call>", "1 < 2, <tool, </tool_call>", []),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "clock", "parameters": {OSLO}}}\n',
        "",
        [("weather", ROME), ("clock", OSLO)],
    ),
    ("llama3_json", f'\n<|python_tag|>{{"name": "clock", "arguments": {TRICKY}}}', "", [("clock", TRICKY)]),
    (
        "llama3_json",
        f'So: <|python_tag|>{{"name": "weather", "parameters": {ROME}}} ok',
        "So: ok",
        [("weather", ROME)],
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {}} was {', '{"name": "Bob", "parameters": {}} was {', []),
    ("llama3_json", f'Say {{"name": "weather", "parameters": {ROME}}}', None, []),
    (
        "mistral",
        f'I ask. [TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "clock", "arguments": {OSLO}}}]',
        "I ask.",
        [("weather", ROME), ("clock", OSLO)],
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ROME}[TOOL_CALLS]g[CALL_ID]a1B[ARGS]{TRICKY}", "", [("f", ROME), ("g", TRICKY)]),
    ("mistral", f"[TOOL_CALLS]f{OSLO}\n", "", [("f", OSLO)]),
    ("mistral", "[TOOL_CALLS] [] and [x]", " [] and [x]", []),
    (
        "pythonic",
        "Sure: [weather(city=\"Rome\"), clock(a=[1, -2.5, (True, None)], b={'x)]': false}, c='it\\'s')]",
        "Sure:",
        [
            ("weather", ROME),
            ("clock", '{"a": [1, -2.5, [true, null]], "b": {"x)]": false}, "c": "it\'s"}'),
        ],
    ),
    ("pythonic", '<|python_start|>[ weather( city = "Rome" ) ]<|python_end|>', "", [("weather", ROME)]),
    ("pythonic", "[1, 2] or [clock] or [other(a=1)]", "[1, 2] or [clock] or [other(a=1)]", []),
    (
        "deepseekv3",
        f"On it.\n\n{CALLS_BEGIN}{fenced('weather', ROME)}\n{fenced('clock', OSLO)}{CALLS_END}",
        "On it.",
        [("weather", ROME), ("clock", OSLO)],
    ),
    ("deepseekv3", f"{CALLS_BEGIN}{fenced('f', TRICKY)}{CALLS_END} ok?", " ok?", [("f", TRICKY)]),
    ("deepseekv3", f"{CALL_BEGIN}function{SEP}f\n```json\n{ROME}\n```{CALLS_END}", "", [("f", ROME)]),
    ("deepseekv3", f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n{ROME} so", " so", [("f", ROME)]),
    ("deepseekv3", f"1 <{SEP} ``` {CALL_END}", f"1 <{SEP} ``` {CALL_END}", []),
    (
        "deepseekv31",
        f"I ask.{CALLS_BEGIN}{plain('weather', ROME)}{plain('function', TRICKY)}{CALLS_END}",
        "I ask.",
        [("weather", ROME), ("function", TRICKY)],
    ),
    (
        "kimi_k2",
        f"Sure. {KIMI_BEGIN}{numbered('functions.weather:0', ROME)}{numbered('functions.clock:1', OSLO)}{KIMI_END}",
        "Sure.",
        [("weather", ROME), ("clock", OSLO)],
    ),
    ("kimi_k2", f"{KIMI_BEGIN}\n{numbered(' a.b:c:12 ', TRICKY)}\n{KIMI_END} ok", " ok", [("a.b:c", TRICKY)]),
    ("kimi_k2", f"{KIMI_BEGIN} {KIMI_END}?", f"{KIMI_BEGIN} {KIMI_END}?", []),
    (
        "glm45",
        f"On it.\n{tagged('weather', MIXED)}\n{tagged('clock', {})}\n",
        "On it.",
        [("weather", MIXED_JSON), ("clock", "{}")],
    ),
    (
        "glm45",
        f"{tagged('weather', MIXED, '')}{tagged('f', {'a': ''}, '')} ok?",
        " ok?",
        [("weather", MIXED_JSON), ("f", '{"a": ""}')],
    ),
    (
        "glm45",
        tagged("weather", {"city": "5", "zip": "00100", "unit": "true", "days": "5", "other": "5"}),
        "",
        [("weather", '{"city": "5", "zip": "00100", "unit": "true", "days": 5, "other": 5}')],
    ),
    (
        "glm45",
        tagged("weather", {"days": "five", "a": '1, "b": 2', "c": "01", "d": "{} {}", "e": "NaN", "city": ' "x'}),
        "",
        [
            (
                "weather",
                '{"days": "five", "a": "1, \\"b\\": 2", "c": "01", "d": "{} {}", "e": "NaN", "city": " \\"x"}',
            )
        ],
    ),
    ("glm45", "<tool_call>a b<tool_call>\n f \t</tool_call>", "<tool_call>a b", [("f", "{}")]),
    ("glm45", "<tool_call>f <arg_<tool_call>g</tool_call>", "<tool_call>f <arg_", [("g", "{}")]),
    ("glm45", "1 < 2, <arg_key>, </tool_call>", "1 < 2, <arg_key>, </tool_call>", []),
    (
        "qwen3_coder",
        f"On it.\n\n{element('weather', MIXED)}\n{element('clock', {})}\n",
        "On it.",
        [("weather", MIXED_JSON), ("clock", "{}")],
    ),
    (
        "qwen3_coder",
        element(
            "weather", {"city": "", "zip": "\n00100\n", "days": "True", "dry": " None", "other": '{"</parameter>": 5}'}
        ),
        "",
        [
            (
                "weather",
                '{"city": "", "zip": "\\n00100\\n", "days": true, "dry": null, "other": {"</parameter>": 5}}',
            )
        ],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=a>[1, x]</parameter></function><function=g></function> so",
        " so",
        [("f", '{"a": "[1, x]"}'), ("g", "{}")],
    ),
    ("qwen3_coder", "<tool_call> <tool_call>\n<function=f></function>", "<tool_call>", [("f", "{}")]),
    ("qwen3_coder", "1 < 2, <function>, </tool_call>", "1 < 2, <function>, </tool_call>", []),
    (
        "gemma4",
        f"On it.\n{bare('weather', DAYS)}{bare('a.b-c', '{}')}\n",
        "On it.",
        [("weather", '{"city": "Rome", "days": [1, 2.5e3, {"deep": null}], "e": {}}'), ("a.b-c", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{ a : <|"|>}]"\\\n<|"</b>, b:<|"|> , <|"|>a key<|"|>:{x: [ ]},n: -1 }<tool_call|> ok?',
        " ok?",
        [("f", '{"a": "}]\\"\\\\\\n<|\\"</b>, b:", "a key": {"x": []}, "n": -1}')],
    ),
    (
        "gemma4",
        bare("f", "{a:True,b:None,c:New York,d:01,e:[x,false],t:12:30}"),
        "",
        [("f", '{"a": true, "b": null, "c": "New York", "d": "01", "e": ["x", false], "t": "12:30"}')],
    ),
    ("gemma4", "<|tool_call>call:f{}<|tool_call>call:g{} so", " so", [("f", "{}"), ("g", "{}")]),
    ("gemma4", "<|tool_call>call:<|tool_call>call:f{a:1}", "<|tool_call>call:", [("f", '{"a": 1}')]),
    ("gemma4", '1 < 2, call:f{}, <|"|>, <tool_call|>', '1 < 2, call:f{}, <|"|>, <tool_call|>', []),
    ("gpt-oss", f"{CALL_HEAD}{ROME}", "", [("weather", ROME)]),
    (
        "gpt-oss",
        f"So. {START}assistant{CALL_HEAD}{TRICKY}{CALL} {START}assistant to=functions.clock{CHANNEL}commentary{MESSAGE}"
        f" {OSLO}",
        "So.",
        [("weather", TRICKY), ("clock", OSLO)],
    ),
    ("gpt-oss", f" to=functions.f{CHANNEL}commentary json{MESSAGE}{{}}{CALL}{START}x", f"{START}x", [("f", "{}")]),
    ("gpt-oss", f"to be {CHANNEL}final{MESSAGE}or{END}", f"to be {CHANNEL}final{MESSAGE}or{END}", []),
]
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", "<tool_call>\nf(1)</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 600),
    ("llama3_json", '{"name": "weather", "parameters": {"city": Rome}}'),
    ("pythonic", "[weather(city=Rome)]"),
    ("pythonic", '[weather("Rome")]'),
    ("pythonic", "[clock(**x)]"),
    ("pythonic", "[clock(a=1e999)]"),
    ("pythonic", "[weather(city='Ro"),
    ("deepseekv3", f"{CALLS_BEGIN}{fenced('f', '{oops}')}{CALLS_END}"),
    ("deepseekv3", f"{CALLS_BEGIN}{fenced('f', '[1]')}{CALLS_END}"),
    ("deepseekv3", f"{CALLS_BEGIN}{fenced('a b', ROME)}{CALLS_END}"),
    ("deepseekv3", f"{CALLS_BEGIN}{CALL_BEGIN}{CALL_BEGIN} {{x"),
    ("deepseekv3", f"{CALLS_BEGIN} f({{}})"),
    ("deepseekv3", CALLS_BEGIN),
    ("deepseekv3", f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f" + " " * 300 + ROME),
    ("deepseekv31", f'{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{{"a": 1'),
    ("kimi_k2", f"{KIMI_BEGIN}{numbered('functions.f', ROME)}{KIMI_END}"),
    ("kimi_k2", f"{KIMI_BEGIN}{numbered('functions.f:0', '{1}')}{KIMI_END}"),
    ("kimi_k2", f"{KIMI_BEGIN}{KIMI_CALL}functions.f:0 {{}}"),
    ("glm45", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("glm45", "<tool_call>f(1)</tool_call>"),
    ("glm45", "<tool_call>f x</tool_call>"),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key></arg_key>\n<arg_value>1</arg_value></tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>"),
    ("glm45", f"<tool_call>{'f' * 300}</tool_call>"),
    ("glm45", f"<tool_call>f<arg_key>{'a' * 300}</arg_key>"),
    ("glm45", tagged("f", {"a": "1", " a ": "2"})),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool"),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call><function=a b></function></tool_call>"),
    ("qwen3_coder", "<function=></function>"),
    ("qwen3_coder", f"<function={'f' * 200}></function>"),
    ("qwen3_coder", f"<function=f><parameter={'a' * 300}>"),
    ("qwen3_coder", "<function=f><parameter=></parameter></function>"),
    ("qwen3_coder", "<function=f>\na=1\n</function>"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    ("qwen3_coder", "<function=weather><parameter=city>\nRo"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></tool_call>"),
    ("gemma4", '<|tool_call>{"name": "f", "arguments": {}}<tool_call|>'),
    ("gemma4", "<|tool_call>call:f(a=1)<tool_call|>"),
    ("gemma4", "<|tool_call>call:a b{}<tool_call|>"),
    ("gemma4", bare("f", "{a:1,}")),
    ("gemma4", bare("f", "{a:}")),
    ("gemma4", bare("f", "{a:1,a:2}")),
    ("gemma4", bare("f", '{a:"x"y}')),
    ("gemma4", bare("f", '{a:x"y"}')),
    ("gemma4", bare("f", "{a:[1}")),
    ("gemma4", bare("f", "{1}")),
    ("gemma4", '<|tool_call>call:f{"a":1}<tool_call|>'),
    ("gemma4", "<|tool_call>call:f{a:b<|tool_cal"),
    ("gemma4", "<|tool_call>call:f{a:1<|<"),
    ("gemma4", f"<|tool_call>call:f{{{' ' * 1100}}}"),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Ro'),
    ("gemma4", f"<|tool_call>call:f{{{'a' * 300}:1}}<tool_call|>"),
    ("gpt-oss", f"{CALL_HEAD}{{oops}}{CALL}"),
    ("gpt-oss", f"{CALL_HEAD}weather(){CALL}"),
    ("gpt-oss", f"{CALL_HEAD}"),
    ("gpt-oss", f"{CHANNEL}commentary to=python{MESSAGE}{{}}{CALL}"),
    ("gpt-oss", f"{CHANNEL}commentary to=functions.a*b{MESSAGE}{{}}{CALL}"),
    ("gpt-oss", f"{CHANNEL}{CHANNEL}{START}{'x' * 600}{MESSAGE}"),
]
