"""The lengths of what a request can carry, and the errors that name field, limit and what was sent.

No error shows what was sent when it is long: it tells the length.
"""

from collections.abc import Collection, Sequence

import msgspec

from overlap_spec.errors import RequestError

MAX_STOP_IDS = 64  # ids per request, EOS included: the width of the worker's stop-id rows
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000  # of a stop string, and of a pattern
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 300_000  # whatever the vocabulary: the largest that is known has 262,208
MAX_BAD_WORDS = 128
MAX_WORD_TOKENS = 8  # of a bad word
MAX_WORD_CHARS = 2048  # of a bad word, whatever the tokenizer: 8 tokens of 256 characters
MAX_MARKER_TOKENS = 8  # of a marker of reasoning: the width of the worker's rows
MAX_MARKERS = 64  # of a grammar, and special tokens that are shown
MAX_MARKER_CHARS = 256
MAX_GRAMMAR_BYTES = 256 << 10
MAX_TOP_LOG_PROBS = 20  # most probable tokens at a position: OpenAI's bound
MAX_LISTED_LOG_PROBS = 32  # token ids whose log-probs are returned at every position
MAX_LOG_PROBS = 1 << 21  # of all answers to a request: choices x tokens x (1 + top + listed)
MAX_ID_CHARS = 256  # of an id that a user chooses
MAX_KEY_NAME_CHARS = 128  # of the name of an API key
# Of a request's, which may begin with the name of its key and end with the number of a choice.
MAX_WIRE_ID_CHARS = MAX_KEY_NAME_CHARS + 1 + MAX_ID_CHARS + 16
MAX_SALT_BYTES = 256  # of a client's own salt of the prefix cache, as UTF-8
MAX_NAME_CHARS = 1024  # of a client's name, a key, a method
MAX_TEMPLATE_CHARS = 64 << 10
MAX_TEMPLATE_ARGUMENTS = 64  # of a chat template, by name
MAX_TOOLS = 1024
MAX_MESSAGES = 1 << 15  # of a conversation, whatever the context: as many objects as a body may have
MOST = 2**63  # what a message can carry
# A message with a longer list is not read: a list takes many times the bytes of its message. Shorter ones that are too
# long are refused by a rule, which tells what was sent.
FEW = msgspec.Meta(max_length=1 << 12)
MANY = msgspec.Meta(max_length=4 * MAX_ALLOWED_IDS)
SHOWN_CHARS = 100  # of a value, in an error
SHOWN_ITEMS = 8  # of a list


def shown(value: object) -> str:
    """A value as an error shows it: whole if it is short, else how long it is."""
    if isinstance(value, str | bytes):
        unit = "characters" if isinstance(value, str) else "bytes"
        return repr(value) if len(value) <= SHOWN_CHARS else f"{len(value)} {unit}"
    if isinstance(value, Collection):
        if len(value) > SHOWN_ITEMS:
            return f"{len(value)} of them"
        return f"[{', '.join(map(shown, value))}]"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + ".."


def check_text(field: str, text: str, most: int) -> None:
    """Raises: RequestError if a text is too long."""
    if len(text) > most:
        raise RequestError(field, f"{field} must be at most {most} characters, got {len(text)}")


def check_salt(field: str, salt: str) -> None:
    """Raises: RequestError unless this can keep a client's prefixes apart from others'."""
    num_bytes = len(salt) if len(salt) > MAX_SALT_BYTES else len(salt.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_SALT_BYTES:
        raise RequestError(field, f"{field} must be at most {MAX_SALT_BYTES} bytes, got {num_bytes}")
    if "\0" in salt:
        raise RequestError(field, f"{field} must have no NUL")


def check_count(field: str, items: Collection[object], most: int, what: str) -> None:
    """Raises: RequestError if there are too many items. `what`: their name in the plural."""
    if len(items) > most:
        raise RequestError(field, f"{field} must be at most {most} {what}, got {len(items)} of them")


def check_strings(field: str, strings: Sequence[str], most: int, most_chars: int, what: str) -> None:
    """Raises: RequestError if there are too many strings, or one is too long."""
    check_count(field, strings, most, what)
    longest = max(map(len, strings), default=0)
    if longest > most_chars:
        raise RequestError(field, f"{field} must be {what} of at most {most_chars} characters, got one of {longest}")
