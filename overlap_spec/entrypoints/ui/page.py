"""`/ui`: a page to chat with the engine and to watch it. Its files are in `ui/`; it loads nothing from elsewhere.

The page itself is open, as `/docs` is: it holds nothing of the engine's. What it asks for needs the API key. Model
output reaches it as text, and the policy below lets nothing else run.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.entrypoints.http.errors import Problem

PAGE = "index.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = (
    *("style.css", "tokens.css", "main.js", "chat.js", "stream.js", "tokens.js", "details.js", "settings.js"),
    *("live.js", "timeline.js", "steps.js", "timeline.css", "elements.js", "icon.svg"),
)
OPEN_PATHS = frozenset({"/ui", *(f"/ui/{name}" for name in FILES)})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class UiPage:
    """The page and its files, read once."""

    def __init__(self) -> None:
        folder = files("overlap_spec.entrypoints.ui").joinpath("static")
        self._contents = {name: folder.joinpath(name).read_bytes() for name in (PAGE, *FILES)}

    def routes(self) -> list[Route]:
        """The endpoints; those of other paths below `/ui` have to come before."""
        return [Route("/ui", self.page), Route("/ui/{name}", self.file)]

    async def page(self, request: Request) -> Response:
        """Show a chat and what the engine does meanwhile, in a browser. The page loads nothing from elsewhere."""
        return self._answer(PAGE)

    async def file(self, request: Request) -> Response:
        """A script, a style or the icon of the page."""
        name = request.path_params["name"]
        if name not in FILES:
            raise Problem(404, f"the page has no file {name!r}", code="not_found")
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        return Response(self._contents[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
