"""Names of tools, and their calls' ids."""

import random
import re
import string
import uuid

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
SHORT_ID_LENGTH = 9
_LETTERS = string.ascii_letters + string.digits


def is_name(name: str) -> bool:
    """Whether a tool may have this name."""
    return NAME.fullmatch(name) is not None


def new_id() -> str:
    """As OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: Mistral's chat templates refuse any other."""
    return "".join(random.choices(_LETTERS, k=SHORT_ID_LENGTH))
