"""The page's routes. `page_app(store)` is a Starlette application; the control plane mounts it, `rollyard view` serves it.

Every answer carries the same strict headers. Anything that changes something needs the token, by form field, and only exists
when one was given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hmac import compare_digest
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from rollyard.core.errors import ConfigError, Error
from rollyard.page import rollouts, search_page, side_by_side, tables, tokens
from rollyard.page.export import run_page
from rollyard.page.plane_routes import KeyCheck, Operator, plane_routes
from rollyard.page.planes import PlaneTables
from rollyard.page.query import read_query
from rollyard.page.rendering import HEADERS, http_error, page, refuse
from rollyard.store import Store
from rollyard.store.values import NoteKind

_STATIC = Path(__file__).parent / "static"


class Actions(Protocol):
    """What a person with the token may do. Starting returns the new rollout's id; `command` says the same for a terminal."""

    @property
    def running(self) -> tuple[str, ...]:
        """Rollouts that were started here and can be cancelled here."""
        ...

    def choices(self) -> Mapping[str, Any]: ...
    def command(self, form: Mapping[str, str]) -> str: ...
    async def start(self, form: Mapping[str, str]) -> str: ...
    async def cancel(self, rollout_id: str) -> bool: ...
    async def branch(self, rollout_id: str, form: Mapping[str, str]) -> None: ...
    async def rescore(self, rollout_id: str) -> None: ...


def page_app(
    store: Store,
    *,
    plane: PlaneTables | None = None,
    plane_key: KeyCheck | None = None,
    operator: Operator | None = None,
    actions: Actions | None = None,
    token: str | None = None,
) -> Starlette:
    """Read-only without `actions` and `token`; `plane` adds the control plane's tables. With `plane_key`, what has ids of
    instances and names of owners is shown to those who give that key, as the password of their browser's own form; they change
    keys and quotas through `operator`."""
    if (actions is None) != (token is None):
        raise ConfigError("actions need a token, and a token is for actions")
    shown = _Page(store, actions, token, planed=plane is not None)
    routes: list[BaseRoute] = [
        Route("/", shown.runs),
        Route("/runs/{run_id}", shown.run),
        Route("/runs/{run_id}/tasks", shown.tasks),
        Route("/runs/{run_id}/tasks/{task_id:path}", shown.run),
        Route("/runs/{run_id}/run.html", shown.whole),
        Route("/rollouts/{rollout_id}", shown.rollout),
        Route("/rollouts/{rollout_id}/steps", shown.steps),
        Route("/rollouts/{rollout_id}/tokens", shown.tokens),
        Route("/rollouts/{rollout_id}/diff", shown.diff),
        Route("/rollouts/{rollout_id}/log", shown.log),
        Route("/rollouts/{rollout_id}/raw/{call_id}", shown.raw),
        Route("/rollouts/{rollout_id}/files/{name:path}", shown.file),
        Route("/compare", shown.compare),
        Route("/side", shown.side),
        Route("/search", shown.search),
        Route("/live", shown.live),
        Route("/start", shown.start, methods=["GET", "POST"]),
        Route("/rollouts/{rollout_id}/cancel", shown.cancel, methods=["POST"]),
        Route("/rollouts/{rollout_id}/branch", shown.branch, methods=["GET", "POST"]),
        Route("/rollouts/{rollout_id}/rescore", shown.rescore, methods=["POST"]),
        Route("/rollouts/{rollout_id}/notes", shown.add_note, methods=["POST"]),
        Route("/rollouts/{rollout_id}/notes/{note_id:int}/remove", shown.remove_note, methods=["POST"]),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    if plane is not None:
        routes += plane_routes(shown.show, plane, plane_key, operator)
    return Starlette(routes=routes, exception_handlers={Error: refuse, HTTPException: http_error})


def plane_page_app(
    plane: PlaneTables, plane_key: KeyCheck | None = None, operator: Operator | None = None
) -> Starlette:
    """The control plane's tables alone, where there is no store of runs."""

    def show(request: Request, name: str, **fields: Any) -> HTMLResponse:
        return page(request, name, writable=False, planed=True, runs_kept=False, **fields)

    async def begin(request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + "/plane", 303, headers=HEADERS)

    routes = [Route("/", begin), Mount("/static", StaticFiles(directory=_STATIC))]
    return Starlette(
        routes=[*routes, *plane_routes(show, plane, plane_key, operator)],
        exception_handlers={Error: refuse, HTTPException: http_error},
    )


class _NoteForm(msgspec.Struct, frozen=True, kw_only=True):
    author: str
    kind: NoteKind
    name: str = ""
    text: str = ""
    score: float | None = None
    token: str = ""


class _Page:
    def __init__(self, store: Store, actions: Actions | None, token: str | None, *, planed: bool) -> None:
        self._store, self._planed, self._actions, self._token = store, planed, actions, token
        self._summaries = tables.Summaries(store)

    def show(self, request: Request, name: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
        return page(request, name, status=status, writable=self._actions is not None, planed=self._planed, **fields)

    async def runs(self, request: Request) -> Response:
        return self.show(request, "runs.html", **await tables.runs(self._store, read_query(request)))

    async def run(self, request: Request) -> Response:
        run_id, task = request.path_params["run_id"], request.path_params.get("task_id")
        shown = await tables.run(self._store, self._summaries, run_id, task, read_query(request))
        return self.show(request, "run.html", **shown)

    async def tasks(self, request: Request) -> Response:
        shown = await tables.tasks(self._store, self._summaries, request.path_params["run_id"], read_query(request))
        return self.show(request, "tasks.html", **shown)

    async def whole(self, request: Request) -> Response:
        run_id, text = await run_page(self._store, request.path_params["run_id"])
        headers = {"Content-Disposition": f'attachment; filename="{run_id}.html"', "X-Content-Type-Options": "nosniff"}
        return Response(text, media_type="text/html", headers=headers)

    async def rollout(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        try:
            shown = await rollouts.rollout(self._store, rollout_id, branch=read_query(request).number("branch"))
        except Error:
            running = await rollouts.under_way(self._store, rollout_id)
            if running is None:
                raise
            ours = self._actions is not None and rollout_id in self._actions.running
            return self.show(request, "live.html", cancellable=ours, **running)
        return self.show(request, "rollout.html", **shown)

    async def steps(self, request: Request) -> Response:
        query = read_query(request)
        shown = await rollouts.steps(
            self._store, request.path_params["rollout_id"], branch=query.number("branch"), start=query.number("from")
        )
        return self.show(request, "steps.html", **shown)

    async def tokens(self, request: Request) -> Response:
        query = read_query(request)
        shown = await tokens.show_tokens(
            self._store, request.path_params["rollout_id"], branch=query.number("branch"), start=query.number("from")
        )
        return self.show(request, "tokens.html", **shown)

    async def raw(self, request: Request) -> Response:
        found = await rollouts.raw(self._store, request.path_params["rollout_id"], request.path_params["call_id"])
        return Response(found, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def diff(self, request: Request) -> Response:
        found = await rollouts.diff(self._store, request.path_params["rollout_id"])
        return Response(found, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def log(self, request: Request) -> Response:
        found = await rollouts.log(self._store, request.path_params["rollout_id"])
        return Response(found, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def file(self, request: Request) -> Response:
        data = await rollouts.file(self._store, request.path_params["rollout_id"], request.path_params["name"])
        headers = {**HEADERS, "Content-Disposition": "attachment"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def compare(self, request: Request) -> Response:
        first, second = request.query_params.get("a", ""), request.query_params.get("b", "")
        return self.show(request, "compare.html", **await tables.compare(self._store, first, second))

    async def side(self, request: Request) -> Response:
        first, second = request.query_params.get("a", ""), request.query_params.get("b", "")
        return self.show(request, "side.html", **await side_by_side.show_sides(self._store, first, second))

    async def search(self, request: Request) -> Response:
        return self.show(request, "search.html", **await search_page.find(self._store, read_query(request)))

    async def live(self, request: Request) -> Response:
        """What changed past event number `after`, as JSON; the page's script asks and redraws."""
        query = read_query(request)
        found = await rollouts.live(self._store, query.text("run"), query.text("rollout"), query.number("after"))
        return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)

    # what needs the token

    async def start(self, request: Request) -> Response:
        actions = self._writable()
        if request.method == "GET":
            return self._start_form(request, actions, dict(request.query_params))
        form = await self._form(request)
        try:
            if form.get("do") == "show":
                return self._start_form(request, actions, form, command=actions.command(form))
            self._check_token(form)
            rollout_id = await actions.start(form)
        except Error as error:
            return self._start_form(request, actions, form, problem=str(error))
        return self._go(request, f"/rollouts/{rollout_id}")

    def _start_form(
        self,
        request: Request,
        actions: Actions,
        form: Mapping[str, str],
        *,
        problem: str | None = None,
        command: str | None = None,
    ) -> Response:
        kept = {name: value for name, value in form.items() if name != "token"}
        fields = {"form": kept, "problem": problem, "command": command}
        return self.show(request, "start.html", status=400 if problem else 200, **actions.choices(), **fields)

    async def cancel(self, request: Request) -> Response:
        async def end(rollout_id: str) -> None:
            if not await self._writable().cancel(rollout_id):
                raise HTTPException(409, "it has ended, or was not started on this page; end its run where it runs")

        return await self._act(request, end)

    async def branch(self, request: Request) -> Response:
        """What if the model had said this: the answer of a call to be changed, and a run that goes on from it."""
        actions, rollout_id = self._writable(), request.path_params["rollout_id"]
        form = dict(request.query_params) if request.method == "GET" else await self._form(request)
        problem: str | None = None
        if request.method == "POST":
            self._check_token(form)
            try:
                await actions.branch(rollout_id, form)
                return self._go(request, f"/rollouts/{rollout_id}#branches")
            except (Error, ValueError) as error:
                problem = str(error)
        shown = await rollouts.answer_at(self._store, rollout_id, form.get("at", ""))
        kept = {name: value for name, value in form.items() if name != "token"}
        fields = {**shown, "form": kept, "problem": problem}
        return self.show(request, "branch.html", status=400 if problem else 200, **fields)

    async def rescore(self, request: Request) -> Response:
        return await self._act(request, self._writable().rescore)

    async def add_note(self, request: Request) -> Response:
        self._writable()
        form = await self._form(request)
        self._check_token(form)
        try:
            note = msgspec.convert({name: text for name, text in form.items() if text.strip()}, _NoteForm, strict=False)
        except msgspec.ValidationError as error:
            raise HTTPException(400, f"no note: {error}") from error
        rollout_id = request.path_params["rollout_id"]
        fields = {"author": note.author, "name": note.name, "text": note.text}
        score = note.score if note.kind == "score" else None
        try:
            await self._store.add_note(rollout_id, note.kind, **fields, score=score)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        return self._go(request, f"/rollouts/{rollout_id}#notes")

    async def remove_note(self, request: Request) -> Response:
        self._writable()
        self._check_token(await self._form(request))
        rollout_id = request.path_params["rollout_id"]
        if not await self._store.remove_note(rollout_id, request.path_params["note_id"]):
            raise HTTPException(404, "there is no such note")
        return self._go(request, f"/rollouts/{rollout_id}#notes")

    async def _act(self, request: Request, action: Callable[[str], Awaitable[Any]]) -> Response:
        self._check_token(await self._form(request))
        rollout_id = request.path_params["rollout_id"]
        await action(rollout_id)
        return self._go(request, f"/rollouts/{rollout_id}")

    def _go(self, request: Request, path: str) -> Response:
        return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + path, status_code=303, headers=HEADERS)

    def _writable(self) -> Actions:
        if self._actions is None:
            raise HTTPException(403, "this page is read-only; start it with a token to allow changes")
        return self._actions

    async def _form(self, request: Request) -> dict[str, str]:
        return {key: value for key, value in (await request.form()).items() if isinstance(value, str)}

    def _check_token(self, form: Mapping[str, str]) -> None:
        if self._token is None or not compare_digest(form.get("token", ""), self._token):
            raise HTTPException(403, "the token is missing or wrong")
