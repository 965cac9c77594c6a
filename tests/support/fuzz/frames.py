"""Frames for the public ZMQ link: messages of every kind, and the same with a part replaced, cut or declared longer.

Messages are made from the types that decode them, so a new field is fuzzed without a word here.
"""

from array import array
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect

from overlap_spec.messages import ToFrontendFromClient

FRAMES_TOGETHER = 4  # at most
Tree = Any  # what msgpack holds: None, bool, int, float, str, bytes, lists and dicts of them

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 5, 100, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**64 - 1])
FLOATS = st.sampled_from([0.0, 0.5, 1.0, 0.9, 1.5, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
TEXTS = st.sampled_from(
    ["", "a", "one two", "\u0000", "é" * 40, "{{ x", "(", "[a-z]+", "☃", "</s>", '{"type":"object"}']
)
IDS = st.lists(st.integers(-1, 140), max_size=30).map(lambda ids: array("i", ids).tobytes())
BLOBS = IDS | st.binary(max_size=9)
ANY: SearchStrategy[Tree] = st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, TEXTS, st.binary(max_size=5))
ANY = ANY | st.lists(ANY, max_size=3) | st.dictionaries(TEXTS, ANY, max_size=2)
LENGTHS = [  # headers of msgpack that announce far more than follows, and nesting without an end
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xda\xff\xff", b"\xc5\xff\xff", b"\xd8\x05"),
    *(b"\x91" * 3000, b"\x81\xa0" * 3000, b"\xc1", b"\xd9", b""),
]


def messages() -> SearchStrategy[Tree]:
    """Trees that decode to a message of a client; values may still be refused. Half are requests likely to run."""
    return likely_requests() | values_of(inspect.type_info(ToFrontendFromClient))


def likely_requests() -> SearchStrategy[Tree]:
    """`Generate` with few tokens, and one or two parameters that may be anything of their type."""
    prompts = st.one_of(
        st.lists(st.integers(3, 120), min_size=1, max_size=40).map(
            lambda ids: ["TokenPrompt", array("i", ids).tobytes()]
        ),
        TEXTS.map(lambda text: ["TextPrompt", text]),
        st.just(["ChatPrompt", [{"role": "user", "content": "Why?"}]]),
    )
    return st.builds(lambda id, prompt, sampling: ["Generate", id, prompt, sampling], NAMES, prompts, sampling())


def sampling() -> SearchStrategy[Tree]:
    """Sampling parameters, most of them left out."""
    shape = inspect.type_info(ToFrontendFromClient)
    assert isinstance(shape, inspect.UnionType)
    generate = next(each for each in shape.types if isinstance(each, inspect.StructType) and each.tag == "Generate")
    (params,) = (field.type for field in generate.fields if field.name == "sampling")
    assert isinstance(params, inspect.StructType)
    fields = {field.encode_name: values_of(field.type) for field in params.fields}
    few = st.fixed_dictionaries({"max_new_tokens": st.integers(0, 8)})
    one = st.sampled_from(sorted(fields)).flatmap(lambda name: fields[name].map(lambda value: {name: value}))
    return st.one_of(few, st.builds(lambda a, b: a | b, one, few), st.builds(lambda a, b, c: a | b | c, one, one, few))


def sendings() -> SearchStrategy[list[bytes]]:
    """Frames that are sent together: any, or requests and what they share, of which a frame may be another."""
    some = st.lists(frames(), min_size=1, max_size=FRAMES_TOGETHER)
    prompts = st.lists(st.just(["TokenPrompt", array("i", [5, 6, 7]).tobytes()]) | ANY, min_size=1, max_size=2)
    shared = st.builds(lambda of, by: ["Shared", of, by], prompts, st.lists(sampling() | ANY, min_size=1, max_size=2))
    index = st.integers(-1, 2)
    request = st.builds(lambda id, of, by: ["GenerateShared", id, of, by], NAMES, index, index)
    group = st.builds(lambda first, rest: [first, *rest], shared, st.lists(request, min_size=1, max_size=4))
    packed = group.map(lambda messages: [msgspec.msgpack.encode(each) for each in messages])
    spoilt = st.builds(lambda sent, at, new: [*sent[:at], new, *sent[at:]], packed, st.integers(0, 4), frames())
    return st.one_of(some, some, packed, spoilt)


NAMES = st.text("abcdefgh", min_size=1, max_size=8) | TEXTS


def values_of(shape: inspect.Type) -> SearchStrategy[Tree]:
    """What decodes to a type, as far as its type tells."""
    match shape:
        case inspect.UnionType(types):
            return st.one_of(*(values_of(each) for each in types))
        case inspect.StructType():
            return _structs(shape)
        case inspect.ListType(item) | inspect.VarTupleType(item):
            return st.lists(values_of(item), max_size=3)
        case inspect.TupleType(items):
            return st.tuples(*(values_of(each) for each in items)).map(list)
        case inspect.DictType(keys, values):
            return st.dictionaries(values_of(keys), values_of(values), max_size=2)
        case inspect.EnumType(cls):
            return st.sampled_from([each.value for each in cls])
        case inspect.LiteralType(values):
            return st.sampled_from(values)
    return SIMPLE[type(shape)]


SIMPLE: dict[type, SearchStrategy[Tree]] = {
    inspect.NoneType: st.none(),
    inspect.BoolType: st.booleans(),
    inspect.IntType: st.integers(-1, 9) | NUMBERS,
    inspect.FloatType: FLOATS,
    inspect.StrType: NAMES,
    inspect.BytesType: BLOBS,
    inspect.AnyType: ANY,
    inspect.RawType: ANY,
}


def _structs(shape: inspect.StructType) -> SearchStrategy[Tree]:
    """An array ends after any field from the last required one on; a map may leave out what has a default."""
    fields = {field.encode_name: values_of(field.type) for field in shape.fields}
    required = [field.encode_name for field in shape.fields if field.required]
    if not shape.array_like:
        tag = {} if shape.tag is None else {str(shape.tag_field): st.just(shape.tag)}
        needed = {name: fields.pop(name) for name in required}
        return st.fixed_dictionaries({**tag, **needed}, optional=fields)
    tags = [] if shape.tag is None else [shape.tag]
    whole = st.tuples(*fields.values())
    return st.builds(lambda all, end: [*tags, *all[:end]], whole, st.integers(len(required), len(fields)))


def frames() -> SearchStrategy[bytes]:
    """One frame, whatever it holds."""
    whole = messages()
    packed = whole.map(msgspec.msgpack.encode)
    spots = st.integers(0, 200)
    return st.one_of(
        packed,
        packed,
        st.builds(_replace, whole, st.lists(st.integers(0, 6), max_size=5), ANY).map(msgspec.msgpack.encode),
        st.builds(lambda frame, end: frame[: end % (len(frame) + 1)], packed, spots),
        st.builds(_overwrite, packed, spots, st.binary(min_size=1, max_size=3)),
        st.builds(_overwrite, packed, spots, st.sampled_from(LENGTHS)),
        st.binary(max_size=60),
    )


def _replace(tree: Tree, path: list[int], new: Tree) -> Tree:
    """The tree with another value somewhere."""
    if not path or not isinstance(tree, list | dict) or not tree:
        return new
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[path[0] % len(keys)]
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[key] = _replace(tree[key], path[1:], new)
    return changed


def _overwrite(frame: bytes, at: int, new: bytes) -> bytes:
    at %= len(frame) + 1
    return frame[:at] + new + frame[at + len(new) :]
