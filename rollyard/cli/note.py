"""`rollyard note ROLLOUT [TEXT]`: words, labels and scores of people, kept beside the verifier's."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

if TYPE_CHECKING:
    from rollyard.store.values import Note

app = new_verb()


@app.command()
def note(
    rollout: Annotated[
        str, typer.Argument(help="rollout: id, its start, or the short id that lists and the page show")
    ],
    text: Annotated[str, typer.Argument(help="text of the note; with nothing to add, the notes are printed")] = "",
    label: Annotated[list[str] | None, typer.Option(help="a label; may be repeated")] = None,
    score: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, a score of yours; may be repeated")] = None,
    author: Annotated[str | None, typer.Option(help="author of the note (unset: your user name)")] = None,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Add notes, labels and scores to a rollout, or print those it has. `rollyard export` writes them too.

    rollyard note 5cwya7tr "edits the test" --label "reward hack" --score style=0.5
    """
    from rollyard.cli.printing import print_json

    scores = [read_score(one) for one in score or ()]
    kept = anyio.run(_note, store, rollout, text, label or [], scores, author or _user_name())
    if json:
        print_json(kept)
        return
    for one in kept:
        said = {"note": one.text, "label": one.name, "score": f"{one.name} = {one.score}"}[one.kind]
        typer.echo(f"{one.kind:6} {said}  ({one.author})")


def read_score(text: str) -> tuple[str, float]:
    from rollyard.core.errors import ConfigError

    name, _, number = text.rpartition("=")
    try:
        return name.strip(), float(number)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a score", hint="write --score NAME=NUMBER, such as style=0.5") from error


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that is in no list of users
        return f"user {os.getuid()}"


async def _note(
    where: str, rollout: str, text: str, labels: list[str], scores: list[tuple[str, float]], author: str
) -> list[Note]:
    from rollyard.core.errors import ConfigError
    from rollyard.store import Store

    async with Store.open(where, create=False) as store:
        kind, found = await store.resolve(rollout)
        if kind != "rollout":
            raise ConfigError(f"{rollout} is a run", hint="notes are on rollouts; rollyard list RUN shows them")
        if text:
            await store.add_note(found, "note", author=author, text=text)
        for name in labels:
            await store.add_note(found, "label", author=author, name=name)
        for name, number in scores:
            await store.add_note(found, "score", author=author, name=name, score=number)
        return (await store.notes([found])).get(found, [])
