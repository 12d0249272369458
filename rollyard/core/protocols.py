"""The contracts at which packages meet. Implementations are values of these shapes and do not inherit from them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, Unpack, overload, runtime_checkable

import msgspec

from rollyard.core.call import Call, CallRecord, Reply
from rollyard.core.delta import Blob
from rollyard.core.egress import Egress
from rollyard.core.errors import Error
from rollyard.core.events import Event
from rollyard.core.node import Node
from rollyard.core.program import Command, ExecOptions, Program, StartOptions
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.sandbox import Capabilities, Exit, MemoryUse, Resources, SandboxInfo, SandboxSpec, SandboxUsage, Stat
from rollyard.core.task import Task


class ByteStream(Protocol):
    """A two-way byte stream; `receive` returns b"" at the end, `send_eof` half-closes."""

    async def receive(self, max_bytes: int = 65536) -> bytes: ...
    async def send(self, data: bytes) -> None: ...
    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...


class Listener(Protocol):
    """A host-side listening place that only one sandbox can reach, at 127.0.0.1:`port` inside it.

    `sock` is a real listening socket when the backend has one (`loop.create_server(sock=...)` takes it); where it is None,
    `accept` hands out streams.
    """

    port: int

    @property
    def sock(self) -> socket.socket | None: ...
    async def accept(self) -> ByteStream: ...
    async def aclose(self) -> None: ...


class Job(Protocol):
    """One background program. Its id is durable: another process finds it by `Sandbox.job`."""

    id: str

    async def poll(self) -> int | None: ...
    async def wait(self, timeout: float | None = None) -> Exit: ...
    def stream(self, offset: int = 0, *, stderr: bool = False) -> AsyncIterator[tuple[int, bytes]]: ...
    async def tail(self, n: int = 4096, *, stderr: bool = False) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def cpu_s(self) -> float | None: ...
    async def kill(self) -> None: ...


class Sandbox(Protocol):
    """One live isolated place. `exec` and `start` come with `core.program.ProgramCalls`."""

    id: str
    info: SandboxInfo
    capabilities: Capabilities

    @property
    def egress(self) -> Egress | None:
        """The rules of a sandbox that may reach some hosts, while its opener lives."""
        ...

    @overload
    async def exec(self, program: Program, /) -> Exit: ...
    @overload
    async def exec(self, program: Command, /, **options: Unpack[ExecOptions]) -> Exit: ...
    @overload
    async def start(self, program: Program, /) -> Job: ...
    @overload
    async def start(self, program: Command, /, **options: Unpack[StartOptions]) -> Job: ...
    async def job(self, job_id: str) -> Job: ...
    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes: ...
    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str: ...
    async def write(
        self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None
    ) -> None: ...
    async def exists(self, path: str) -> bool: ...
    async def stat(self, path: str) -> Stat: ...
    async def list_dir(self, path: str) -> list[Stat]: ...
    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None: ...
    async def remove(self, path: str) -> None: ...
    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None: ...
    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> int:
        """Gives how many entries, or directories with all below them, were left out: no path can name them on the host."""
        ...

    async def listen(self, port: int = 0) -> Listener: ...
    async def dial(self, port: int) -> ByteStream: ...
    async def snapshot(self) -> str: ...
    async def extend(self, ttl_s: float) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def alive(self) -> bool: ...
    async def kill_processes(self) -> None:
        """End every program in the sandbox, however it was started, and keep the sandbox and its files."""
        ...

    async def kill(self) -> bool: ...


@runtime_checkable
class MeasuresUsage(Protocol):
    """A sandbox whose backend says what it uses."""

    async def usage(self) -> SandboxUsage: ...


@runtime_checkable
class ListsWrites(Protocol):
    """A sandbox of which the host sees what was written, whatever its programs say."""

    async def list_writes(self, since: float) -> tuple[str, ...]:
        """Paths that were written, replaced or removed at that time (seconds of the epoch) or later."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """A sandbox whose memory can go to the machine's swap while its agent waits. `freeze` is for an agent that would fetch it
    back at once."""

    async def put_to_sleep(self, *, freeze: bool = False) -> None: ...
    async def wake(self) -> None: ...


@runtime_checkable
class SleepsSandboxes(Protocol):
    """A backend whose sandboxes can sleep."""

    def check_sleep(self) -> None:
        """Raises `Unsupported` where the machine has no swap."""
        ...


class Opening(Protocol):
    """What `Backend.open` returns: await it for a sandbox you close yourself, or enter it to have it closed."""

    def __await__(self) -> Generator[object, None, Sandbox]: ...
    async def __aenter__(self) -> Sandbox: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Backend(Protocol):
    name: str

    @property
    def capabilities(self) -> Capabilities: ...
    def open(self, spec: SandboxSpec) -> Opening: ...
    async def attach(self, sandbox_id: str) -> Sandbox: ...
    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]: ...
    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """A backend whose sandboxes are on one machine, and that says how much of its memory each of those it opened holds."""

    async def memory(self) -> MemoryUse: ...


@runtime_checkable
class OwnImages(Protocol):
    """A backend whose images are kept by an engine of its own: it builds Dockerfiles and removes images there."""

    async def build_image(self, folder: str, *, resources: Resources, timeout_s: float) -> str: ...
    async def remove_image(self, image: str) -> None: ...


@runtime_checkable
class KeepsBuilds(Protocol):
    """A backend that keeps the images that were built for tasks."""

    async def remove_baked(self) -> list[str]:
        """Delete every image that was built or baked, by any process; their names."""
        ...


@runtime_checkable
class RemovesStates(Protocol):
    """A backend that gives chosen states of builds back while it is at work."""

    async def remove_states(self, keys: Collection[str]) -> list[str]:
        """Delete the images that builds kept under these keys, but for those with a name and those that a sandbox uses."""
        ...


@runtime_checkable
class BakesLayers(KeepsBuilds, Protocol):
    """A backend that mounts no layers and keeps an image with one in it instead, made once for all rollouts."""

    async def bake_layer(
        self, image: str, layer: str, *, title: str, source: str, prefix: str, resources: Resources
    ) -> str | None:
        """What to open in place of `image`: it has the folder `source` of this machine at `prefix`. None: it has to be uploaded
        into each sandbox. `layer` is the id that the layer's contents give, `title` what people call it."""
        ...

    async def find_baked(self, image: str, layer: str, *, title: str, resources: Resources) -> str | None:
        """What `bake_layer` would give, where it was made before."""
        ...


class Policy(Protocol):
    """Who answers a call. `closed` tells it that a rollout is over; `aclose` that everything is."""

    async def __call__(self, call: Call) -> Reply: ...
    async def closed(self, rollout_id: str) -> None: ...
    async def aclose(self) -> None: ...


@runtime_checkable
class HasText(Protocol):
    """A policy that knows the text it was made from (`upstream:URL#key_env=NAME`): the text makes it again in another
    process. None where it was made otherwise, or with a key that no text may hold."""

    text: str | None


@runtime_checkable
class Checkable(Protocol):
    """A policy that can say before a run whether its server will answer at all: no server listens, the key is refused, the model
    is not there. `model` is what agents call it. Raises; a server that is only busy passes."""

    async def check(self, model: str) -> None: ...


class Prefix(Protocol):
    """How a rollout begins that branches off another one: its parent's calls, answered as they were. `take` gives a call as
    the policy is to see it, and the recorded answer where it lies before the branch point; it raises `BranchDiverged`, which
    `diverged` keeps, where the call is not the parent's. `pinned` counts the calls of the prefix that differed in clock and
    ids alone, and were taken in the parent's words."""

    @property
    def reached(self) -> bool:
        """Whether the branch point was asked for."""
        ...

    diverged: Error | None
    pinned: int

    def history(self, rollout_id: str) -> Sequence[tuple[Call, Reply]]:
        """What the rollout's own trajectory begins with, where its agent does not ask for it again."""
        ...

    def take(self, call: Call) -> tuple[Call, Reply | None]: ...
    def unreached_error(self) -> Error:
        """What to say of a rollout that ended before its branch point."""
        ...


class RawRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, for a policy that passes bytes through."""

    rollout_id: str
    method: str
    path: str  # below the base url, with its query
    headers: Mapping[str, str]
    body: bytes


class RawResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`explain` says for the operator what a refusal's body means, without keys."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]
    explain: Callable[[bytes], str] | None = None


@runtime_checkable
class LearnsModel(Protocol):
    """A policy that asks its server which model it has, and how that model's prompts are written, where it was not told."""

    async def discover(self) -> object: ...


@runtime_checkable
class DeclaresOptions(Protocol):
    """A policy that says which options of a rollout's calls it acts on; the others are refused before anything opens. One
    that does not say is the caller's own code, which finds them in `Call.options`."""

    @property
    def honours(self) -> frozenset[str]: ...


@runtime_checkable
class Passthrough(Protocol):
    """A policy that answers with bytes in the agent's own dialect and leaves them untouched (`black_box`)."""

    async def relay(self, request: RawRequest) -> RawResponse: ...


class Held(Protocol):
    """A call that waits for the trainer. One reply is taken; a second, or a late one, is refused and changes nothing."""

    call: Call

    async def reply(self, *args: Any, **fields: Any) -> None: ...
    async def fail(self, message: str, *, status: int = 500) -> None: ...


class HeldCalls(Protocol):
    """`take` waits for a first call, then up to `wait` seconds for more of them; [] means that nothing will come any more.
    When `timeout` seconds pass without a call it raises TimeoutError. A cancelled `take` has taken nothing."""

    async def take(self, max: int = 64, wait: float = 0.01, timeout: float | None = None) -> Sequence[Held]: ...
    async def reply(self, call_id: str, reply: Reply) -> None: ...
    async def cancel(self, call_id: str, message: str, *, status: int = 500) -> None: ...


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A gate session as it survives a restart: the key only as a hash. `attempt_id` and `fence` name the claim it works
    under: once another worker has that, the log takes nothing more from this session."""

    rollout_id: str
    key_hash: bytes
    created_at: float
    closed_at: float | None = None
    settings: Mapping[str, Any] = {}
    attempt_id: str | None = None
    fence: int | None = None


class CallLog(Protocol):
    """Where the gate makes calls durable. `commit` returns once the record would survive SIGKILL."""

    async def commit(self, record: CallRecord, nodes: Sequence[Node], blobs: Mapping[bytes, Blob]) -> None: ...
    async def save_session(self, session: SessionRecord) -> None: ...
    async def close_session(self, rollout_id: str, at: float) -> None: ...
    async def sessions(self) -> Sequence[SessionRecord]: ...
    async def load_calls(self, rollout_id: str) -> tuple[Sequence[CallRecord], Sequence[Node]]: ...
    async def load_blob(self, digest: bytes, rollout_id: str) -> bytes:
        """A body that a call of this rollout names."""
        ...


class EventSink(Protocol):
    async def __call__(self, event: Event) -> None: ...


class Runner(Protocol):
    def __call__(self, task: Task, **options: Any) -> Awaitable[Rollout]: ...


class Verifier(Protocol):
    async def __call__(self, sandbox: Sandbox, rollout: Rollout) -> Verdict: ...
