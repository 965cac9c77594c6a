"""The engine on Ray Serve: one engine in each replica, behind one address, on one machine or many.

    client ──HTTP──► Ray's proxy ──► Ingress ──PrefixRouter──► EngineReplica: the server's app, Engine, its processes
                                        │                        (another machine, another GPU)
                                        └─ the body as bytes, and its prompt for the router

`build_app` makes the application of flags, `build` of a dict, for `serve run` and Serve's config files. The API is the
server's own app in every replica; the ingress passes bytes on. Needs the extra: `pip install 'overlap-spec[ray]'`.
"""

from typing import TYPE_CHECKING, Any

from overlap_spec.entrypoints.ray.scaling import ReplicaFlags

if TYPE_CHECKING:
    from overlap_spec.entrypoints.ray.application import build, build_app

__all__ = ["ReplicaFlags", "build", "build_app"]


def __getattr__(name: str) -> Any:
    """Load the application when it is first asked for. Raises: ImportError naming the extra, without Ray Serve."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ray.serve  # noqa: F401 - only whether it is installed is asked
    except ImportError as error:
        wanted = f"overlap_spec.entrypoints.ray needs Ray Serve: pip install 'overlap-spec[ray]' ({error})"
        raise ImportError(wanted) from error
    from overlap_spec.entrypoints.ray import application

    return getattr(application, name)
