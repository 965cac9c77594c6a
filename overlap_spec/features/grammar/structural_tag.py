"""Structural tags: free text in which a trigger begins a part that follows a JSON schema (SGLang's first format)."""

from collections.abc import Collection
from typing import Any

import msgspec
from llguidance import StructTag


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constrained part: its beginning, which starts with a trigger, the schema of what follows, and its end."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct, frozen=True):
    """The text of a grammar of this kind."""

    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def tags_to_lark(text: str, special_tokens: Collection[str]) -> str:
    """The tag as a Lark grammar. Raises: ValueError, or msgspec's error, saying what is wrong.

    `special_tokens`: triggers that are single tokens, which no text is encoded to.
    """
    tag = msgspec.json.decode(text, type=StructuralTag)
    tags = [_tag(structure, tag.triggers) for structure in tag.structures]
    if not tags:
        raise ValueError("structures: at least one is needed")
    special = {each.trigger in special_tokens for each in tags}
    if len(special) > 1:
        raise ValueError("triggers: all or none must be special tokens")
    return StructTag.to_grammar(tags, assume_special=special.pop())


def _tag(structure: Structure, triggers: list[str]) -> StructTag:
    trigger = next((each for each in triggers if each and structure.begin.startswith(each)), None)
    if trigger is None:
        raise ValueError(f"structures: begin {structure.begin!r} starts with none of the triggers {triggers}")
    schema = structure.schema if isinstance(structure.schema, dict) else {}
    return StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end)
