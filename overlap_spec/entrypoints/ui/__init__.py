"""The page, and how the engine does now, as JSON, which the page asks for once a second.

`/ui/live` is made of what `/metrics` shows: the engine's last report and the latencies that this server has seen.
`/ui/timeline` is what the processes did in the last seconds. They record only while it is asked for.

`/ui`: a page to chat with the engine and to watch it. Its files are in `ui/`; it loads nothing from elsewhere.

The page itself is open, as `/docs` is: it holds nothing of the engine's. What it asks for needs the API key. Model
output reaches it as text, and the policy below lets nothing else run.
"""

import time
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.entrypoints.http.app import Api, ApiParts
from overlap_spec.entrypoints.http.auth import check_admin
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo, Watch
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.openapi import HTML, Endpoint
from overlap_spec.entrypoints.http.operations import as_json, newest_stats
from overlap_spec.messages import AdaptFigures, EngineHealth, Record, Stats, shown
from overlap_spec.metrics.prometheus import ServerMetrics, WeightedHistogram

MOST_STEPS = 1000  # of a timeline


class LiveStep(msgspec.Struct, frozen=True):
    """A step of the last interval. Seconds, means; `host_hidden`: what of `host` the device did not wait for."""

    device: float
    gap: float  # the device waited
    host: float
    host_hidden: float
    efficiency: float | None  # 0..1; null where the device's ceilings are not known
    width: int  # columns of the last decode step
    count: int  # since the start
    experts: float | None  # distinct ones that a layer reads in a decode step; null of dense targets
    num_experts: int  # of a layer


class LivePages(msgspec.Struct, frozen=True):
    """KV pages: held by requests, by the prefix cache alone, and in all. `size`: tokens in a page.

    Of snapshots of recurrent states, bytes, and how many requests looked for one and found one; 0 of other targets.
    """

    used: int
    cached: int
    total: int
    size: int
    snapshot_bytes: int = 0
    most_snapshot_bytes: int = 0
    snapshot_lookups: int = 0
    snapshot_hits: int = 0


class LiveLatency(msgspec.Struct, frozen=True):
    """Of requests that this server has answered. Seconds; null before the first."""

    newest: float | None
    mean: float | None
    count: int


class LiveFigures(msgspec.Struct, frozen=True):
    """The answer. Rates are of the last interval with work, about a second."""

    state: str
    draft: str
    model: str
    method: str
    ranks: int  # that share each layer
    num_steps: int  # guesses in a row that a step can verify
    accept_length: float  # committed tokens per verify step, bonus included
    accept_rate: float
    accepted_per_position: tuple[int, ...]  # guesses accepted at positions 1, 2, .. since the start
    drafts: int  # verify steps with guesses since the start
    proposed: int  # guesses verified since the start
    tokens_per_s: float
    generated: int  # tokens since the start
    running: int
    queued: int
    first_token: LiveLatency
    pages: LivePages
    step: LiveStep
    adapt: AdaptFigures | None = None  # of a draft that learns from the texts it serves


class LiveTimeline(msgspec.Struct, frozen=True):
    """What the client, the frontend, the scheduler, the worker and its device did. `now`: on the records' clock."""

    now: float
    records: list[Record]


class Live:
    """The endpoints."""

    def __init__(
        self, client: EngineClient, metrics: ServerMetrics, info: ServerInfo, health: HealthOf, watch: Watch
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._info = info
        self._health = health
        self._watch = watch

    def routes(self) -> list[Route]:
        return [Route("/ui/live", self.figures), Route("/ui/timeline", self.timeline)]

    async def figures(self, request: Request) -> Response:
        """Report accept length, throughput, queue, pages and the parts of a step, as the page shows them.

        It is of all clients' requests, so it needs the operator's key, where there is one.
        """
        check_admin(request)
        return as_json(self._figures(await newest_stats(self._client), self._health()))

    async def timeline(self, request: Request) -> Response:
        """Report what the engine's processes did in its last `steps`: spans [track, name, begin, end, step, more].

        They record from the first question on until 5 seconds after the last one; `steps`, of the query: 64. It needs
        the operator's key, where there is one.
        """
        check_admin(request)
        steps = _num_steps(request.query_params.get("steps", "64"))
        return as_json(LiveTimeline(time.monotonic(), _last_steps(self._watch(), steps)))

    def _figures(self, stats: Stats, health: EngineHealth) -> LiveFigures:
        settings = self._info.settings
        size = settings.get("page_size") or 1
        used, cached, total = (
            tokens // size for tokens in (stats.num_used_tokens, stats.num_cached_tokens, stats.max_total_tokens)
        )
        return LiveFigures(
            state=health.state.value,
            draft=health.draft.value,
            model=self._info.model_name,
            method=self._info.method,
            ranks=self._info.ranks,
            num_steps=self._info.num_steps,
            accept_length=stats.accept_length,
            accept_rate=stats.accept_rate,
            accepted_per_position=stats.accepted_per_position_total,
            drafts=stats.drafts_total,
            proposed=stats.proposed_tokens_total,
            tokens_per_s=stats.gen_throughput,
            generated=stats.generation_tokens_total,
            running=stats.num_running,
            queued=stats.num_queued,
            first_token=_latency(self._metrics.first_token),
            pages=LivePages(used, cached, total, size, *_snapshots(stats)),
            step=_step(stats),
            adapt=stats.adapt,
        )


def _snapshots(stats: Stats) -> tuple[int, ...]:
    counts = stats.snapshot_lookups_total, stats.snapshot_hits_total
    return stats.snapshot_bytes, stats.max_snapshot_bytes, *counts


def _num_steps(text: str) -> int:
    """Raises: Problem for what is no number of steps."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_STEPS))
    if not is_number or not 0 < int(text) <= MOST_STEPS:
        text = f"steps must be a whole number from 1 to {MOST_STEPS}, got {shown(text)}"
        raise Problem(400, text, "steps", "invalid_value")
    return int(text)


def _last_steps(records: list[Record], steps: int) -> list[Record]:
    """What began with the last steps that the device has done, or later."""
    done = sorted({record.step for record in records if "phase" in record.args})[-steps:]
    begins = [record.begin for record in records if done and record.step == done[0]]
    return [record for record in records if begins and record.begin >= min(begins)]


def _step(stats: Stats) -> LiveStep:
    times = stats.step_time, stats.gpu_gap, stats.host_time, stats.host_time_hidden
    experts = stats.experts_read, stats.num_experts
    return LiveStep(*times, stats.step_efficiency, stats.step_width, stats.steps_total, *experts)


def _latency(seen: WeightedHistogram) -> LiveLatency:
    if not seen.count:
        return LiveLatency(None, None, 0)
    return LiveLatency(seen.newest, seen.total / seen.count, seen.count)


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


FILE_TYPES = tuple(dict.fromkeys(media for media in TYPES.values() if media != HTML))
ENDPOINTS = {
    "/ui": Endpoint(answer=str, media=(HTML,), is_open=True),
    "/ui/{name}": Endpoint(answer=str, media=FILE_TYPES, is_open=True),
    "/ui/live": Endpoint(answer=LiveFigures),
    "/ui/timeline": Endpoint(answer=LiveTimeline),
}


def attach(parts: ApiParts) -> Api:
    """Its routes; those of other paths below `/ui` come before its files'."""
    if not parts.info.ui:
        return Api([], {}, OPEN_PATHS)  # not found without a key, too
    live = Live(parts.client, parts.metrics, parts.info, parts.health, parts.watch)
    return Api([*live.routes(), *UiPage().routes()], ENDPOINTS, OPEN_PATHS)
