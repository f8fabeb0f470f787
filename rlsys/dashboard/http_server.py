"""HTTP server of the dashboard: the addresses of `rlsys.dashboard.responses`, and the files of the pages.

The server only reads the files of a run, and cannot affect the run. It keeps an index in the cache of its user.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.event_decoding import WHOLE
from rlsys.dashboard.index.sql_query import MOST_LETTERS, MOST_ROWS, TableQuery
from rlsys.dashboard.query.queries import MOST_OPENED, Readings
from rlsys.dashboard.query.table_queries import Tables
from rlsys.dashboard.responses import Axis
from rlsys.dashboard.security import error_response
from rlsys.dashboard.stream import Changes, TooManyPages
from rlsys.errors import RlsysError

STATIC = Path(__file__).parent / "static"

_HEARTBEAT_S = 15
_REVISION = re.compile("[0-9]{1,18}")
"""A revision in `Last-Event-ID`; any other text counts as none."""

Run = Annotated[str, Query(max_length=4096)]
Name = Annotated[str, Query(max_length=4096)]
Whole = Annotated[int, Query(ge=0, lt=WHOLE)]


class Answer(Response):
    """JSON answer, with null for a number that is not finite."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401  (as the base class has it)
        return orjson.dumps(content, default=dict)


def app_of(readings: Readings, tables: Tables, changes: Changes) -> FastAPI:
    """All addresses. `rlsys.dashboard.security.Guard` checks access before this app."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=_HANDLERS)
    for router in (_runs(readings, tables), _rollouts(readings), _tables(tables), _stream(changes)):
        app.include_router(router, prefix="/api")
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _runs(readings: Readings, tables: Tables) -> APIRouter:
    router, get = _router()

    @get("/runs")
    def runs() -> Answer:
        return Answer(readings.runs())

    @get("/run")
    def one(run: Run) -> Answer:
        tables.prepare(run)
        return Answer(readings.run(run))

    @get("/series")
    def series(
        run: Run,
        name: Annotated[list[Name], Query(max_length=500)],
        points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
        x: Axis = "step",
        from_x: Annotated[float | None, Query(alias="from", allow_inf_nan=False)] = None,
        to_x: Annotated[float | None, Query(alias="to", allow_inf_nan=False)] = None,
    ) -> Answer:
        return Answer(readings.series(run, name, points, x, (from_x, to_x)))

    @get("/metrics")
    def metrics(run: Run) -> Answer:
        return Answer(readings.metrics(run))

    @get("/alerts")
    def alerts(run: Run) -> Answer:
        return Answer(readings.alerts(run))

    @get("/cluster")
    def cluster(
        run: Run,
        from_s: Annotated[float | None, Query(alias="from", allow_inf_nan=False)] = None,
        to_s: Annotated[float | None, Query(alias="to", allow_inf_nan=False)] = None,
        width: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Answer:
        return Answer(readings.cluster(run, from_s, to_s, width))

    @get("/machine")
    def machine(run: Run, points: Annotated[int, Query(ge=2, le=10_000)] = 500) -> Answer:
        return Answer(readings.machine(run, points))

    @get("/failures")
    def failures(run: Run) -> Answer:
        return Answer(readings.failures(run))

    @get("/ledger")
    def ledger(run: Run) -> Answer:
        return Answer(readings.ledger(run))

    @get("/compare")
    def compare(run: Annotated[list[Run], Query(min_length=1, max_length=MOST_OPENED)]) -> Answer:
        return Answer(readings.compare(run))

    return router


def _rollouts(readings: Readings) -> APIRouter:
    router, get = _router()

    @get("/groups")
    def groups(run: Run, step: Whole | None = None) -> Answer:
        return Answer(readings.rollouts.groups(run, step))

    @get("/group")
    def group(run: Run, step: Whole, group_id: Whole, dataset: Name = "") -> Answer:
        return Answer(readings.rollouts.group(run, step, group_id, dataset))

    @get("/episode")
    def episode(run: Run, step: Whole, group_id: Whole, episode: Whole, dataset: Name = "") -> Answer:
        return Answer(readings.rollouts.episode(run, step, group_id, episode, dataset))

    @get("/evaluations")
    def evaluations(run: Run) -> Answer:
        return Answer(readings.rollouts.evaluations(run))

    @get("/task")
    def task(run: Run, task: Name) -> Answer:
        return Answer(readings.rollouts.task(run, task))

    return router


def _tables(tables: Tables) -> APIRouter:
    router, get = _router()

    @get("/tables")
    def all_tables(run: Run | None = None) -> Answer:
        return Answer(tables.tables(run))

    @get("/query")
    def query(q: Annotated[str, Query(max_length=MOST_LETTERS)], run: Run | None = None) -> Answer:
        return Answer(tables.sql(run, q))

    @get("/table")
    def table(
        table: Name,
        run: Run | None = None,
        condition: Annotated[str, Query(alias="filter", max_length=MOST_LETTERS)] = "",
        search: Name = "",
        order: Name = "",
        show: Name = "",
        group: Name = "",
        from_step: Annotated[Whole | None, Query(alias="from")] = None,
        to_step: Annotated[Whole | None, Query(alias="to")] = None,
        offset: Whole = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
    ) -> Answer:
        is_part = from_step is not None or to_step is not None
        between = (from_step or 0, WHOLE if to_step is None else to_step) if is_part else None
        asked = TableQuery(
            table=table,
            filter=condition,
            search=search,
            order_by=order,
            show=show,
            group_by=group,
            between=between,
            limit=limit,
            offset=offset,
        )
        return Answer(tables.page(run, asked))

    return router


def _stream(changes: Changes) -> APIRouter:
    router, get = _router()

    @get("/stream")
    async def stream(run: Run | None = None, last_event_id: Annotated[str, Header()] = "") -> Response:
        now = await changes.now(run)
        seen = int(last_event_id) if _REVISION.fullmatch(last_event_id) else None

        async def change_events():  # noqa: ANN202  (an async generator of messages)
            async for change in changes.follow(run, now, seen):
                yield ServerSentEvent(orjson.dumps(change).decode(), event="change", id=str(change.revision))

        return EventSourceResponse(change_events(), ping=_HEARTBEAT_S)

    return router


def _router() -> tuple[APIRouter, partial[Any]]:
    router = APIRouter()
    return router, partial(router.api_route, methods=["GET", "HEAD"])


def _unreadable(request: Request, error: Exception) -> Response:
    """Answer an internal error with its text; the server logs the traceback."""
    return error_response(500, f"the dashboard itself failed, see its output: {type(error).__name__}: {error}")


def _refused_by_reader(request: Request, error: RlsysError) -> Response:
    statuses: dict[type[RlsysError], int] = {NoSuch: 404, TooManyPages: 503}
    return error_response(statuses.get(type(error), 400), str(error))


def _not_understood(request: Request, error: RequestValidationError) -> Response:
    return error_response(400, "; ".join(f"{found['loc'][-1]}: {found['msg']}" for found in error.errors()))


def _not_there(request: Request, error: HTTPException) -> Response:
    return error_response(error.status_code, f"{request.url.path}: {error.detail}")


_HANDLERS: dict[Any, Any] = {
    Exception: _unreadable,
    RlsysError: _refused_by_reader,
    RequestValidationError: _not_understood,
    HTTPException: _not_there,
}
