"""Turns CUDA C++ into C++: inline PTX into calls, shared variables into memory of the emulated program.

A statement of inline PTX becomes a block of calls, one per instruction, to functions of `cpp/ptx*.h`:

    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory");

    { u32 ptx_0 = (u32)(shared(barrier)); u32 ptx_1 = (u32)(arrivals);
      ptx::mbarrier_init_shared<ptx::b64>(ptx_0, ptx_1); }

So a kernel's own wrappers run, with the order of their operands. A function has the name of its instruction, where
types and shapes are template arguments, and what makes no difference to the emulator is left out (`_IGNORED`): scopes
and orders of memory, hints to caches, the number of elements of a vector. An instruction that the emulator does not
have is therefore a function that the C++ compiler does not find, by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TYPES = {"r": "u32", "n": "u32", "l": "u64", "h": "u16", "f": "float", "d": "double", "q": "u128"}
_PTX_TYPE = re.compile(r"pred|tf32|(?:[busf]|bf)\d+(?:x2)?|e[45]m[23](?:x2)?")
_SHAPE = re.compile(r"m(\d+)n(\d+)(?:k(\d+))?")
_IGNORED = {
    *(
        "sync",
        "aligned",
        "volatile",
        "weak",
        "relaxed",
        "acquire",
        "release",
        "acq_rel",
        "cta",
        "cluster",
        "gpu",
        "sys",
    ),
    *("nc", "tile", "noinc", "v2", "v4", "v8", "x1", "x2", "x4", "L1::no_allocate", "L1::evict_last", "L2::64B"),
    *("L1::evict_first", "L2::128B", "L2::256B", "ftz", "noftz"),
}
_REGISTERS = {"pred": "bool", "f32": "float", "f64": "double", "b16": "u16", "u16": "u16", "b64": "u64", "u64": "u64"}


def translated(text: str) -> str:
    """The C++ of a CUDA source or header, with as many lines."""
    return _with_shared_variables(_without_assembly(text))


def kernels(text: str) -> dict[str, str]:
    """The kernels in a CUDA source, each with the C++ expression of the number of programs in its cluster."""
    heads = re.findall(r'extern\s+"C"\s+__global__\s+void\b(.*?)\{', _without_comments(text), re.DOTALL)
    attribute = re.compile(r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)")
    found = {}
    for head in heads:
        cluster = re.search(r"__cluster_dims__\s*\(([^,()]*)", head)
        if name := re.search(r"(\w+)\s*\(", attribute.sub("", head)):
            found[name[1]] = cluster[1] if cluster else "1"
    return found


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)


# ---- shared variables ----

_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\((\w+)\)\s+)?([\w:]+)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(
    r"__shared__\s+(?:(?:__align__|alignas)\s*\((\w+)\)\s+)?([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\]\s*)*);"
)


def _with_shared_variables(text: str) -> str:
    text = _DYNAMIC.sub(r"\2* \3 = emulator::dynamic_shared<\2>(\1+0);", text)
    return _STATIC.sub(r'using Shared_\3 = \2 \4; auto& \3 = emulator::shared_variable<Shared_\3>("\3", \1+0);', text)


# ---- inline PTX ----

_ASSEMBLY = re.compile(r"//[^\n]*|\basm\b\s*(?:volatile|__volatile__)?\s*\(")


def _without_assembly(text: str) -> str:
    done, at = [], 0
    while (found := _ASSEMBLY.search(text, at)) is not None:
        done.append(text[at : found.start()])
        at = found.end()
        if found[0].startswith("//"):
            done.append(found[0])
            continue
        end = _closing(text, at)
        semicolon = text.index(";", end) + 1
        done.append(_block(text[at:end]) + "\n" * text.count("\n", found.start(), semicolon))
        at = semicolon
    return "".join([*done, text[at:]])


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that was opened before `at` is closed."""
    depth = 1
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', text[at:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return at + token.start()
    raise ValueError("a parenthesis of inline PTX is not closed")


def _block(statement: str) -> str:
    code, *operands = _sections(statement)
    ptx = "".join(part.encode().decode("unicode_escape") for part in re.findall(r'"((?:\\.|[^"\\])*)"', code))
    constrained = [operand for section in operands[:2] for operand in _operands(section)]
    lines = [_declared(number, *operand) for number, operand in enumerate(constrained)]
    labels = re.findall(r"(?:^|[;{}\s])(\w+):(?!:)", ptx)
    local = f"__label__ {', '.join(labels)}; " if labels else ""
    return "{ " + local + " ".join([*lines, *_instructions(ptx)]) + " }"


def _sections(statement: str) -> list[str]:
    """The parts of a statement between colons: code, outputs, inputs, what is overwritten."""
    parts, depth = [""], 0
    for token in re.findall(r'"(?:\\.|[^"\\])*"|::|.', statement, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        if depth == 0 and token in (":", "::"):
            parts += [""] * len(token)
        else:
            parts[-1] += token
    return parts


def _operands(section: str) -> Iterator[tuple[str, str]]:
    """Constraint and expression of each operand."""
    at = 0
    while (found := re.compile(r'"([^"]*)"\s*\(').search(section, at)) is not None:
        end = _closing(section, found.end())
        yield found[1], section[found.end() : end]
        at = end


def _declared(number: int, constraint: str, expression: str) -> str:
    kind = _TYPES[constraint.strip("=+&")]
    if constraint[0] in "=+":
        return f"{kind}& ptx_{number} = emulator::as_register<{kind}>({expression});"
    return f"{kind} ptx_{number} = ({kind})({expression});"


def _instructions(ptx: str) -> Iterator[str]:
    for statement in re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL).split(";"):
        rest = statement.strip()
        while found := re.match(r"([{}]|\w+:(?!:))\s*", rest):
            yield found[1] + ";" * found[1].endswith(":")
            rest = rest[found.end() :]
        if rest:
            yield _instruction(rest)


def _instruction(text: str) -> str:
    if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
        return f"{_REGISTERS.get(declared[1], 'u32')} {_names(declared[2])};"
    if predicated := re.fullmatch(r"@(!?)(\S+)\s+(.*)", text, re.DOTALL):
        return f"if ({predicated[1]}({_operand(predicated[2])})) {{ {_instruction(predicated[3])} }}"
    opcode, *rest = text.split(maxsplit=1)
    operands = _split("".join(rest))
    if opcode in ("bra", "bra.uni"):
        return f"goto {operands[0]};"
    return f"ptx::{_function(opcode)}({', '.join(map(_operand, operands))});"


def _names(text: str) -> str:
    return text.replace("%%", "").replace("%", "")


def _function(opcode: str) -> str:
    parts = opcode.split(".")
    kept = [parts[0], *(part for part in parts[1:] if part not in _IGNORED or parts[:2] == ["barrier", part])]
    types = [argument for part in kept if (argument := _template_argument(part))]
    name = "_".join(part.replace("::", "_") for part in kept if not _template_argument(part))
    name = name.replace("shared_cta", "shared").replace("shared_cluster", "shared")
    if parts[0] == "ld" and {"acquire", "relaxed", "volatile"} & set(parts):
        name = "ld_polled" + name.removeprefix("ld")
    return f"{name}<{', '.join(types)}>" if types else name


def _template_argument(part: str) -> str:
    if shape := _SHAPE.fullmatch(part):
        return f"ptx::Shape<{shape[1]}, {shape[2]}, {shape[3] or 0}>"
    return f"ptx::{part}" if _PTX_TYPE.fullmatch(part) else ""


def _split(text: str) -> list[str]:
    """Operands, at the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str) -> str:
    text = text.strip()
    if text.startswith("["):
        return ", ".join(map(_operand, _split(text[1:-1])))
    if text.startswith("{"):
        return f"ptx::list({', '.join(map(_operand, _split(text[1:-1])))})"
    if text == "_":
        return "ptx::nowhere()"
    if special := re.fullmatch(r"%%(\w+)(?:\.([xyz]))?", text):
        return f"ptx::special_{special[1]}{'_' + special[2] if special[2] else ''}()"
    if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"emulator::float_of(0x{bits[1]}u)"
    return re.sub(r"%(\d+)", r"ptx_\1", text)
