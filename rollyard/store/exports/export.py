"""From a run in the store to a file: which writer, which rollouts, and what was refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from rollyard.core.errors import ConfigError, StoreError, UnknownName
from rollyard.core.message import ToolSpec
from rollyard.core.rollout import Rollout
from rollyard.store.exports.atif import AtifDocuments
from rollyard.store.exports.harbor_job import HarborJob
from rollyard.store.exports.inspect import InspectLog
from rollyard.store.exports.lines import AttemptLines, SampleLines, TurnLines
from rollyard.store.exports.sink import JsonLines, Writer
from rollyard.store.listing import run_id
from rollyard.store.partial_files import remove_dead_parts
from rollyard.store.store import Store
from rollyard.store.values import RunInfo
from rollyard.trajectory.branch import BRANCH_KINDS, BranchKind
from rollyard.trajectory.samples import TRAINED_KINDS
from rollyard.trajectory.value_tree import ValueTree, leaf_of

Format = Literal["jsonl", "turns", "samples", "parquet", "atif", "inspect", "harbor"]
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "parquet", ".json": "atif", ".eval": "inspect"}
_tools = msgspec.msgpack.Decoder(tuple[ToolSpec, ...])


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """`refused` counts branches that are no rows, `dropped` rollouts that were left out; both are listed in `refused_at`."""

    format: Format
    path: str
    rollouts: int
    rows: int
    refused: int = 0
    dropped: int = 0
    refused_at: str | None = None


Refuse = Callable[[Rollout], str | None]
FindRefuse = Callable[[Store, str], Awaitable[Refuse]]


async def export_run(
    where: str,
    run: str,
    out: str,
    format: str | None,
    kinds: Collection[str] | None,
    unscored: bool,
    find_refuse: FindRefuse | None = None,
) -> Exported:
    """`find_refuse` says of the run that was found what is left out."""
    async with Store.open(where, create=False) as store:
        found = await run_id(store, run)
        return await export(
            store,
            found,
            out,
            format=cast("Format | None", format),
            kinds=cast("Collection[BranchKind] | None", kinds),
            unscored=unscored,
            refuse=await find_refuse(store, found) if find_refuse is not None else None,
        )


async def export(
    store: Store,
    run_id: str,
    out: str | Path,
    *,
    format: Format | None = None,
    kinds: Collection[BranchKind] | None = None,
    unscored: bool = False,
    refuse: Refuse | None = None,
) -> Exported:
    """Write all rollouts of a run. Without `format` the suffix of `out` decides. `kinds` are the branches that become rows
    (`TRAINED_KINDS`; `("user",)` for those of a simulated user), or the calls that become turns (all). `unscored` also exports
    rows of rollouts without a reward. `atif` into a directory writes a file per rollout, into a file a line per rollout; `harbor`
    makes a new folder, a job of Harbor. A rollout for which `refuse` gives a reason is left out
    (`rollyard.runs.scan.scan.find_refuse` finds what refuses rewards that cannot be trusted)."""
    path = Path(out)
    if not path.name:
        raise ConfigError(f"{str(out)!r} names no file", hint="give a path such as rows.jsonl")
    chosen = _choose_format(format, path)
    _check_kinds(kinds, chosen)
    if unscored and chosen not in ("samples", "parquet"):
        raise ConfigError(
            f"the format {chosen!r} has rollouts without a reward in any case",
            hint="unscored is for samples and parquet",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory")
    info = await store.get_run(run_id)
    count, refused, dropped = 0, 0, 0
    refused_at = path.with_name(path.name + ".refused.jsonl")
    for made in (path, refused_at):
        remove_dead_parts(made)
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        # one thread for all: Arrow and its compression keep memory for each thread that used them
        thread = stack.enter_context(ThreadPoolExecutor(1, "rollyard-export"))
        tree = await _load_tree(store, info) if chosen in ("samples", "parquet") else ValueTree(())
        try:
            writer = stack.enter_context(_writer(chosen, path, tree, kinds, unscored))
        except OSError as error:
            raise StoreError(f"cannot make {path}: {os.strerror(error.errno) if error.errno else error}") from error
        if isinstance(writer, InspectLog | HarborJob):
            writer.info = info
        noted = await store.find_noted(run_id) if isinstance(writer, AttemptLines) else frozenset[str]()
        refusals: JsonLines | None = None
        async for rollout in store.rollouts(run_id, trajectories=chosen != "jsonl" or refuse is not None):
            if refuse is not None and (why := await asyncio.to_thread(refuse, rollout)) is not None:
                refusals = refusals or stack.enter_context(JsonLines(refused_at))
                refusals.write({"rollout_id": rollout.id, "reasons": [why]})
                dropped += 1
                continue
            if isinstance(writer, AtifDocuments | HarborJob):
                await _give_tools(store, rollout, writer)
            if isinstance(writer, AttemptLines):
                found = await store.notes([rollout.id]) if rollout.id in noted else {}
                writer.notes = found.get(rollout.id, ())
            reasons = await loop.run_in_executor(thread, writer.add, rollout)
            count += 1
            refused += len(reasons)
            if reasons:
                refusals = refusals or stack.enter_context(JsonLines(refused_at))
                for reason in reasons:
                    refusals.write(reason)
    return Exported(
        format=chosen,
        path=str(path),
        rollouts=count,
        rows=writer.rows,
        refused=refused,
        dropped=dropped,
        refused_at=str(refused_at) if refused or dropped else None,
    )


def _choose_format(format: Format | None, path: Path) -> Format:
    found = format or _BY_SUFFIX.get(path.suffix) or ("atif" if path.is_dir() else None)
    if found is None and not path.suffix:
        raise ConfigError(
            f"{path} has no suffix to tell its format by", hint=f"name the format: {', '.join(get_args(Format))}"
        )
    if found is None or found not in get_args(Format):
        raise UnknownName("export format", str(format or path.suffix), get_args(Format))
    return found


def _check_kinds(kinds: Collection[BranchKind] | None, format: Format) -> None:
    if kinds is None:
        return
    if format not in ("turns", "samples", "parquet"):
        raise ConfigError(
            f"the format {format!r} has all kinds of calls", hint="kinds are for turns, samples and parquet"
        )
    for kind in kinds:
        if kind not in BRANCH_KINDS:
            raise UnknownName("kind of call", kind, BRANCH_KINDS)
    if not kinds:
        raise ConfigError("no kind of call is asked for", hint=f"of {', '.join(BRANCH_KINDS)}")


async def _load_tree(store: Store, info: RunInfo) -> ValueTree:
    """What the branch points of a run are worth, where it has any."""
    if not (info.config.get("tree") or info.config.get("branch")):
        return ValueTree(())
    return ValueTree([leaf_of(rollout) async for rollout in store.rollouts(info.id, trajectories=False)])


def _writer(
    format: Format, path: Path, tree: ValueTree, kinds: Collection[BranchKind] | None, unscored: bool
) -> Writer:
    trained = TRAINED_KINDS if kinds is None else kinds
    match format:
        case "jsonl":
            return AttemptLines(path)
        case "turns":
            return TurnLines(path, kinds)
        case "samples":
            return SampleLines(path, tree, kinds=trained, unscored=unscored)
        case "parquet":
            from rollyard.store.exports.parquet import ParquetRows

            return ParquetRows(path, tree, kinds=trained, unscored=unscored)
        case "atif":
            return AtifDocuments(path)
        case "inspect":
            return InspectLog(path)
        case "harbor":
            return HarborJob(path)


async def _give_tools(store: Store, rollout: Rollout, writer: AtifDocuments | HarborJob) -> None:
    """Hand over the tool lists that the rollout's calls name and the writer has not seen."""
    for record in rollout.captured.records:
        if record.tools_digest and record.tools_digest not in writer.tools:
            writer.tools[record.tools_digest] = await tools_named(store, record.tools_digest)


async def tools_named(store: Store, digest: bytes) -> tuple[ToolSpec, ...]:
    """The tools that a call offered to the model."""
    try:
        return _tools.decode(await store.get_blob(digest.hex())) if digest else ()
    except StoreError:
        return ()  # a call without tools names a list that was never kept
