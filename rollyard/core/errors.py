"""The one tree of errors.

    Error
    ├── ConfigError                bad input or settings; nothing was started
    │   ├── UnknownName            a name no registry knows; lists those that exist
    │   ├── MissingExtra           an optional package is not installed; carries the pip command
    │   ├── Unsupported            a capability or option this part does not have
    │   ├── ImageNotPulled         a registry has no such image, refuses it, or sent other bytes than it names
    │   └── IsolationTooWeak       the sandbox cannot give the isolation that was asked for
    ├── Interrupted                a person stopped it (Ctrl-C); says what is done and how to go on
    ├── CannotListen               the address of a server is taken, or is not this machine's
    ├── SandboxError               boundary: sandbox
    │   ├── SandboxUnavailable     it was never made, or may be asked again (rate limit, capacity, refused)
    │   ├── SandboxInterrupted     a call broke after it was sent: repeat only what is idempotent
    │   ├── StreamDropped          a stream broke while the program runs on: reattach, never run again
    │   ├── SandboxGone            the sandbox is dead: open another
    │   ├── CommandTimeout         a stage's command ran past its limit
    │   ├── CommandFailed          a command that had to succeed did not; carries code and output
    │   │   └── AgentInstallFailed the agent could not be put into its sandbox
    │   └── PathError              a file operation failed inside the sandbox (missing, full, not permitted)
    ├── AgentError                 boundary: agent
    │   ├── AgentTimeout
    │   └── AgentParked            no call in flight, no CPU, no output
    ├── GateError                  boundary: gate
    │   ├── BadRequest             not decodable in its dialect (HTTP 400)
    │   ├── Unauthorized           unknown or malformed key (401)
    │   ├── SessionClosed          the key's rollout is over (409)
    │   ├── TooLarge               (413)
    │   ├── GateUnreachable        the sandbox cannot reach the gate
    │   └── BranchDiverged         a branch asked something else than its parent did
    ├── PolicyError                boundary: policy
    │   ├── UpstreamError          the model server said no; carries its status
    │   │   └── ContextFull        the prompt does not fit into the model's context: the agent's doing
    │   ├── PolicyClosed           the policy takes no more calls
    │   ├── RolloutStale           its answers are of a policy too many versions ago
    │   └── ReplyRefused           a second, late or invalid reply
    ├── VerifierError              boundary: verifier
    ├── EnvError                   boundary: env
    │   ├── EnvUnavailable         no place, or no server, for now
    │   ├── UnknownTool            no server offers a tool of this name; nothing was asked
    │   ├── EpisodeLost            the session is gone: begin another episode
    │   └── SessionNotStarted      a rollout ended before its agent ran; carries the rollout
    ├── StoreError                 boundary: store
    │   └── LeaseLost              another owner holds the claim now
    ├── Untrainable                a rollout with a reward has no token that may be trained on; lists the reasons
    └── PlaneError                 a refusal of the control plane: Plane{Invalid, Unauthorized, Forbidden, NotFound, Conflict,
                                   Gone, TooLarge, Quota, RateLimited, Unsupported, Draining, Unavailable}, one code each

Every error knows three things: the boundary it crossed, how it may be tried again (a property of its type, never of its
text), and what the user can do next (`hint`). Values that could hold a secret are never put into the message.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from rollyard.core.rollout import Rollout

Boundary = Literal["sandbox", "agent", "gate", "policy", "verifier", "env", "store"]
Retry = Literal["safe", "if_idempotent", "reattach", "gone", "timeout", "configuration", "never"]


class Error(Exception):
    """Root of everything this package raises on purpose."""

    boundary: ClassVar[Boundary | None] = None
    retry: ClassVar[Retry] = "never"

    def __init__(self, message: str, *, hint: str | None = None, rollout_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rollout_id = rollout_id

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is, whatever its class is made from."""
        return _make_again, (type(self), self.args), self.__dict__


def _make_again(kind: type[Error], args: tuple[Any, ...]) -> Error:
    return kind.__new__(kind, *args)


class ConfigError(Error):
    retry: ClassVar[Retry] = "configuration"


class UnknownName(ConfigError):
    def __init__(self, kind: str, name: str, known: list[str] | tuple[str, ...], *, hint: str | None = None) -> None:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        listing = f"; {guess}known: {', '.join(sorted(known))}" if known else ""
        super().__init__(f"no {kind} named {name!r}{listing}", hint=hint)
        self.name = name
        self.known = tuple(known)


class MissingExtra(ConfigError):
    def __init__(self, package: str, extra: str, *, why: str) -> None:
        super().__init__(f"{why} needs the package {package!r}", hint=f"pip install 'rollyard[{extra}]'")
        self.extra = extra


class Unsupported(ConfigError):
    """What was asked for is real, but this part cannot do it; the message names the part and the option."""


class ImageNotPulled(ConfigError):
    """Asking again is answered alike. `status` is the registry's HTTP status, where it is what refused."""

    boundary: ClassVar[Boundary | None] = "sandbox"

    def __init__(self, message: str, *, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class IsolationTooWeak(ConfigError):
    boundary: ClassVar[Boundary | None] = "sandbox"


class Interrupted(Error):
    """A signal ended the program: Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class CannotListen(Error):
    retry: ClassVar[Retry] = "safe"

    def __init__(self, host: str, port: int | None, error: OSError) -> None:
        """Without a `port`, `host` is the path of a socket."""
        taken = error.errno == errno.EADDRINUSE
        # asyncio puts words and addresses of its own into `strerror`; a name that is not found has a number below 0
        said = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
        why = "another program listens there" if taken else said
        hint = f"choose another {'path' if port is None else 'port'}, or end that program" if taken else None
        super().__init__(f"cannot listen on {host if port is None else f'{host}:{port}'}: {why}", hint=hint)


class SandboxError(Error):
    boundary: ClassVar[Boundary | None] = "sandbox"


class SandboxUnavailable(SandboxError):
    retry: ClassVar[Retry] = "safe"

    def __init__(self, message: str, *, retry_after: float | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class SandboxInterrupted(SandboxError):
    retry: ClassVar[Retry] = "if_idempotent"


class StreamDropped(SandboxError):
    retry: ClassVar[Retry] = "reattach"


class SandboxGone(SandboxError):
    retry: ClassVar[Retry] = "gone"


class CommandTimeout(SandboxError):
    retry: ClassVar[Retry] = "timeout"


class CommandFailed(SandboxError):
    def __init__(
        self, message: str, *, exit_code: int | None, stdout: str = "", stderr: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr


class AgentInstallFailed(CommandFailed):
    """An agent that could not be put into its sandbox. The agent had no part in it: it never ran."""

    retry: ClassVar[Retry] = "safe"


class PathError(SandboxError):
    """Carries the errno name, so that callers tell a missing path (`ENOENT`) from a full disk (`ENOSPC`)."""

    def __init__(self, path: str, errno_name: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {errno_name}", hint=hint)
        self.path = path
        self.errno_name = errno_name


class AgentError(Error):
    boundary: ClassVar[Boundary | None] = "agent"


class AgentTimeout(AgentError):
    retry: ClassVar[Retry] = "timeout"


class AgentParked(AgentError):
    retry: ClassVar[Retry] = "safe"


class GateError(Error):
    """An answer to the agent; `status` is its HTTP status, `code` its short machine word."""

    boundary: ClassVar[Boundary | None] = "gate"
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class BadRequest(GateError):
    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request_error"


class RefusedMember(BadRequest):
    """A request asks for what no agent may: to change what is sampled, or to use what the provider stores."""


class ThreadNotFound(GateError):
    """A request continues a conversation that the server is to remember. The gate remembers none: the client sends it all."""

    status: ClassVar[int] = 404
    code: ClassVar[str] = "thread_not_found"


class Unauthorized(GateError):
    status: ClassVar[int] = 401
    code: ClassVar[str] = "authentication_error"


class SessionClosed(GateError):
    status: ClassVar[int] = 409
    code: ClassVar[str] = "session_closed"


class TooLarge(GateError):
    status: ClassVar[int] = 413
    code: ClassVar[str] = "request_too_large"


class GateUnreachable(GateError):
    status: ClassVar[int] = 503
    code: ClassVar[str] = "gate_unreachable"
    retry: ClassVar[Retry] = "safe"


class BranchDiverged(GateError):
    """A rollout that branches off another one is not where its parent was. The message holds the difference: for the
    operator alone."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "branch_diverged"
    retry: ClassVar[Retry] = "never"


REFUSED_FOR_GOOD = (401, 403, 404)  # how a model server refuses a key or a model's name: asking again is answered alike


class PolicyError(Error):
    boundary: ClassVar[Boundary | None] = "policy"


class UpstreamError(PolicyError):
    """The model server's refusal. The message says where and, in the server's own words, why: for the operator alone.
    `body` is its raw answer, for relaying a status; neither reaches an agent or another rollout."""

    retry: ClassVar[Retry] = "safe"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        body: bytes = b"",
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.body = body
        self.retry_after = retry_after


class ContextFull(UpstreamError):
    retry: ClassVar[Retry] = "never"

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400)


class PolicyClosed(PolicyError):
    pass


class RolloutStale(PolicyError):
    retry: ClassVar[Retry] = "never"


class ReplyRefused(PolicyError):
    pass


class VerifierError(Error):
    boundary: ClassVar[Boundary | None] = "verifier"


class EnvError(Error):
    boundary: ClassVar[Boundary | None] = "env"


class EnvUnavailable(EnvError):
    retry: ClassVar[Retry] = "safe"


class UnknownTool(EnvError):
    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no tool named {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        self.name = name


class EpisodeLost(EnvError):
    retry: ClassVar[Retry] = "gone"


class SessionNotStarted(EnvError):
    """What failed is in the message; `rollout` has the commands, their exit codes and their output."""

    def __init__(self, rollout: Rollout) -> None:
        failure = rollout.failure
        where = failure.stage if failure is not None else rollout.status
        super().__init__(f"{where}: {rollout.error or 'the agent was not started'}", rollout_id=rollout.id)
        self.rollout = rollout


class StoreError(Error):
    boundary: ClassVar[Boundary | None] = "store"
    retry: ClassVar[Retry] = "safe"


class LeaseLost(StoreError):
    retry: ClassVar[Retry] = "never"


class Untrainable(Error):
    def __init__(self, rollout_id: str, reasons: tuple[str, ...]) -> None:
        super().__init__(f"rollout {rollout_id} cannot be trained on: {'; '.join(reasons)}", rollout_id=rollout_id)
        self.reasons = reasons


class PlaneError(Error):
    """A refusal of the control plane, on both sides of the wire: `status` is its HTTP status, `code` its machine word."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"


class PlaneInvalid(PlaneError):
    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid"
    retry: ClassVar[Retry] = "configuration"


class PlaneUnauthorized(PlaneError):
    status: ClassVar[int] = 401
    code: ClassVar[str] = "unauthorized"


class PlaneForbidden(PlaneError):
    status: ClassVar[int] = 403
    code: ClassVar[str] = "forbidden"


class PlaneNotFound(PlaneError):
    status: ClassVar[int] = 404
    code: ClassVar[str] = "not_found"
    retry: ClassVar[Retry] = "gone"


class PlaneConflict(PlaneError):
    status: ClassVar[int] = 409
    code: ClassVar[str] = "conflict"


class PlaneGone(PlaneError):
    """It was there and has ended: nothing can be done with it any more."""

    status: ClassVar[int] = 410
    code: ClassVar[str] = "gone"
    retry: ClassVar[Retry] = "gone"


class PlaneTooLarge(PlaneError):
    status: ClassVar[int] = 413
    code: ClassVar[str] = "too_large"


class PlaneQuota(PlaneError):
    status: ClassVar[int] = 429
    code: ClassVar[str] = "quota_exceeded"
    retry: ClassVar[Retry] = "safe"


class PlaneRateLimited(PlaneError):
    status: ClassVar[int] = 429
    code: ClassVar[str] = "rate_limited"
    retry: ClassVar[Retry] = "safe"

    def __init__(self, message: str, *, retry_after: float | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class PlaneUnsupported(PlaneError):
    """The engine cannot do it; the hint names what can."""

    status: ClassVar[int] = 501
    code: ClassVar[str] = "engine_cannot"
    retry: ClassVar[Retry] = "configuration"


class PlaneDraining(PlaneError):
    """This server stops and takes on nothing new; another replica does."""

    status: ClassVar[int] = 503
    code: ClassVar[str] = "draining"
    retry: ClassVar[Retry] = "safe"


class PlaneUnavailable(PlaneError):
    """The plane or an engine behind it did not answer as it should; asking again may help."""

    status: ClassVar[int] = 502
    code: ClassVar[str] = "unavailable"
    retry: ClassVar[Retry] = "safe"
