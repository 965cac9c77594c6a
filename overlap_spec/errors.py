"""Every error this project raises on purpose. It imports nothing of the project.

A user meets five of them: `ConfigError` at start, `CheckpointError` at load, `RequestError` and `RequestTimeout` for
one request and `ActorDied` when the service itself is gone. Each names what is wrong and what would be right.
"""


class OverlapSpecError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(OverlapSpecError, ValueError):
    """A flag or option is wrong. `field` is its Python name (`page_size` for `--page-size`)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"--{field.replace('_', '-')}: {message}")
        self.field = field


class CheckpointError(OverlapSpecError):
    """A checkpoint cannot be used: the message names file, tensor, found and expected."""


class RankLost(OverlapSpecError):
    """Another rank of the model is gone, or answers no more: what they compute together cannot go on."""


class OutOfPages(OverlapSpecError):
    """The page pool cannot hold what was asked for; the planner answers by evicting or preempting."""


class RequestError(OverlapSpecError, ValueError):
    """One request is refused (HTTP 400). `field` names the offending field of that request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Overloaded(OverlapSpecError):
    """The engine does not take this request now (HTTP 503): full, starting or shutting down."""


class RequestTimeout(OverlapSpecError):
    """A time limit has ended the request (HTTP 504). `field` names it: `timeout` or `first_token_timeout`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class RequestAborted(OverlapSpecError):
    """The request was ended before it finished: on request, or because the engine is stopping."""


class RequestFailed(OverlapSpecError):
    """One request cannot go on, through no fault of its client (HTTP 500). The engine and its other requests do.

    `code`: the reason, in a word.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ActorDied(OverlapSpecError):
    """A process of the engine died or failed. `actor` is its name; open requests end with this error.

    `refused`: it could not start with this checkpoint or these flags.
    """

    def __init__(self, actor: str, message: str, refused: bool = False) -> None:
        super().__init__(f"{actor}: {message}")
        self.actor = actor
        self.refused = refused
