"""What each error means and what to do about it: one sentence each, by the error's name.

`rollyard why` and docs/troubleshooting.md read it, and a test asks that no error of the tree is missing. A remedy may name `{id}`
(the rollout), `{run}` and `{sandbox}` (the backend): `why` puts its own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollyard.core.errors import Boundary


class Remedy(NamedTuple):
    cause: str
    remedy: str


REMEDIES: Mapping[str, Remedy] = {
    "Error": Remedy(
        "The root of the tree. Its name alone is never shown.",
        "Catch `rollyard.Error` in Python to catch all of them.",
    ),
    "ConfigError": Remedy(
        "An option, a field or a file is wrong. Nothing was started.",
        "Correct what the message names; `rollyard VERB --help` lists options, `rollyard init` makes files that work.",
    ),
    "UnknownName": Remedy(
        "No agent, policy, backend, verb or field has this name.",
        "Take one of the names that the message lists, or the one it guesses.",
    ),
    "MissingExtra": Remedy(
        "An optional package is not installed.",
        "Run the `pip install` command of the message in the same Python that has Rollyard.",
    ),
    "Unsupported": Remedy(
        "This agent, backend or policy does not have the option or the ability that was asked for.",
        "Leave the option out, or choose another part; docs/agents.md and docs/sandboxes/index.md say what each can do.",
    ),
    "ImageNotPulled": Remedy(
        "A registry has no such image, refuses it, or sent bytes that are not what their digest says; or it may not be asked.",
        "Check the reference; `docker login REGISTRY` keeps an account that is used here; `--pull REGISTRY` lets it be asked.",
    ),
    "IsolationTooWeak": Remedy(
        "The sandbox of this machine is weaker than the agent or `--min-isolation` asks for.",
        "`rollyard doctor` says what is missing; use `--sandbox docker`, or ask for less with `--min-isolation`.",
    ),
    "ToolError": Remedy(
        "A tool of yours refused a call; the agent got its message.",
        "Nothing, where that was meant. Otherwise correct the tool's function.",
    ),
    "Interrupted": Remedy(
        "Ctrl-C. What was in flight was ended, and what was done is kept.",
        "The message ends with the command that resumes the run.",
    ),
    "CannotListen": Remedy(
        "The address of a server is taken by another program, or is not an address of this machine.",
        "Choose another `--port`, `--port 0` for any free one, or end the other program.",
    ),
    "SandboxError": Remedy(
        "A sandbox did not do what it was asked.",
        "`rollyard doctor --sandbox {sandbox}` tries the backend; `rollyard run --resume {run}` runs the attempt again.",
    ),
    "SandboxUnavailable": Remedy(
        "No sandbox could be made now: a rate limit, no capacity, a daemon that does not answer.",
        "It was tried again already. `rollyard doctor --sandbox {sandbox}` tries the backend; lower `--parallel` if a provider "
        "limits you; then `rollyard run --resume {run}`.",
    ),
    "SandboxInterrupted": Remedy(
        "The connection broke after a command was sent, so it may or may not have run.",
        "`rollyard run --resume {run}` runs the attempt again in a new sandbox.",
    ),
    "StreamDropped": Remedy(
        "The stream of a program's output broke while the program ran on.",
        "It is attached to again by itself. If it is shown, the provider was away for too long: `rollyard run --resume {run}`.",
    ),
    "SandboxGone": Remedy(
        "The sandbox is dead: its lifetime ran out, it was killed from outside, or its machine is gone.",
        "Raise the provider's lifetime limit or the machine's memory; `rollyard run --resume {run}` opens another.",
    ),
    "EngineRefused": Remedy(
        "Docker or Podman answered no; its own words are in the message.",
        "Do what the engine says: pull the image, free disk space, ask for fewer CPUs or less memory.",
    ),
    "CommandTimeout": Remedy(
        "A command of set-up, installation or collection ran past its limit.",
        "Give the stage more with `--limits prepare=600` (see `rollyard run --help` for the stages), or make the command faster.",
    ),
    "CommandFailed": Remedy(
        "A command that had to succeed ended with another exit code than 0.",
        "`rollyard show {id} --part events` has its output; correct the task's set-up or its image.",
    ),
    "AgentInstallFailed": Remedy(
        "The agent could not be installed. It never ran, so the attempt has no reward.",
        "Read the installer's output with `rollyard show {id} --part events`; check that npm and pip reach their index, then "
        "`rollyard run --resume {run}`.",
    ),
    "PathError": Remedy(
        "A file operation in the sandbox failed: missing, full, or not permitted; the message has the system's word for it.",
        "ENOSPC: give more storage in task.toml. ENOENT: correct the path. EACCES: look at the user that the task names.",
    ),
    "AgentError": Remedy(
        "The agent's program failed before or beside its work.",
        "Read what it printed with `rollyard show {id} --log`.",
    ),
    "AgentTimeout": Remedy(
        "The agent ran past its limit and was ended. What it left was judged.",
        "More time with `--limits agent=1800`, or `[agent] timeout_sec` in task.toml.",
    ),
    "AgentParked": Remedy(
        "The agent neither asked the model, nor used the CPU, nor printed anything: it waited for something that never comes.",
        "Read what it printed last with `rollyard show {id} --log`: most often it asked a person a question.",
    ),
    "GateError": Remedy(
        "The gate failed to answer the agent.",
        "`rollyard show {id} --part events` has what the gate says; the attempt may be run again.",
    ),
    "BadRequest": Remedy(
        "The agent sent a request that is not valid in its dialect.",
        "The message names the field. An agent that is newer than its description does this: `rollyard check agent NAME`.",
    ),
    "RefusedMember": Remedy(
        "The agent asked for what no agent may: to change what is sampled, or to use what the provider stores for a key.",
        "Switch that feature off in the agent; docs/policies.md lists the fields.",
    ),
    "ServerToolRefused": Remedy(
        "The agent asked for a tool that the provider would run itself (web search, a link that it fetches).",
        "Switch that tool off in the agent (`--disabled-tools NAME`), since it would reach past the sandbox's network.",
    ),
    "ThreadNotFound": Remedy(
        "The agent continues a conversation that a server is to remember. The gate remembers none.",
        "Set the agent to send the whole conversation with each request.",
    ),
    "NotFound": Remedy(
        "The gate has no such path.",
        "Look at the base URL: agents of the OpenAI dialects need it with `/v1`, those of Anthropic's without.",
    ),
    "Unauthorized": Remedy(
        "The key that was sent is not one of the gate's.",
        "Agents must use the key they are given in their environment, not one of a file in the image.",
    ),
    "SessionClosed": Remedy(
        "A call came after its rollout was over.",
        "Nothing: a program that the agent left behind asked once more, and no answer was given.",
    ),
    "TooLarge": Remedy(
        "A request is larger than the gate takes.",
        "Have the agent send less: shorter tool output, smaller pictures.",
    ),
    "GateUnreachable": Remedy(
        "The sandbox cannot reach the gate.",
        "`rollyard doctor --sandbox {sandbox}` tries the way; on hosted sandboxes the relay needs Python or Node in the image.",
    ),
    "SiblingSilent": Remedy(
        "One of the processes of `serve gate --processes` did not answer another one in time.",
        "It is started again by itself if it died: ask again. Where it stays, the server's log has `gate.process_died`.",
    ),
    "GateGaveUp": Remedy(
        "A process of `serve gate --processes` ended each time it was started.",
        "The log has its own error above this one; `rollyard serve gate` with one process shows the same error at once.",
    ),
    "StoreBroken": Remedy(
        "A call was answered and could not be kept, so the agent was not given the answer.",
        "See StoreError: the store is full, locked or away.",
    ),
    "SessionIncomplete": Remedy(
        "The gate was started again, and the session had a policy, tools or a secret of its own that no log can keep.",
        "`GET /sessions/ID` names what is missing; `gate.supply(rollout_id, policy=..., tools=...)` gives it back.",
    ),
    "BranchDiverged": Remedy(
        "A branch asked something else than its parent did, so it is not where the parent was.",
        "Branch from an earlier call, or from a task whose set-up gives the same files each time (docs/branching.md).",
    ),
    "PolicyError": Remedy(
        "What answers the model calls failed.",
        "`rollyard doctor --base-url URL` asks the model server; `rollyard run --resume {run}` runs the attempt again.",
    ),
    "Unjudged": Remedy(
        "The model that `rollyard scan --judge` asked gave no answer that can be used.",
        "The message says why. Earlier labels stand. Ask again with `rollyard scan RUN --judge POLICY`; a larger model keeps "
        "to the asked form more often.",
    ),
    "UpstreamError": Remedy(
        "The model server said no; its status and its own words are in the message.",
        "401 or 403: look at `key_env`. 404: look at the model's name and at `/v1` in the URL. 429 or 5xx: fewer at a time "
        "(`[concurrency]`), then `rollyard run --resume {run}`. `rollyard doctor --base-url URL` asks the server.",
    ),
    "ContextFull": Remedy(
        "The prompt does not fit into the model's context. It counts as the agent's doing.",
        "Serve the model with a longer context, or use an agent that makes its history shorter (docs/agents.md).",
    ),
    "PolicyClosed": Remedy(
        "A call came after the trainer or the run that answers calls had ended.",
        "End rollouts before the policy: close the queue last.",
    ),
    "RolloutStale": Remedy(
        "The rollout's answers are of a policy that is too many versions old (`max_staleness`).",
        "Raise `--max-staleness`, or keep such answers out of the loss with `--when-stale mask`.",
    ),
    "ReplyRefused": Remedy(
        "A trainer's answer came twice, too late, or with ids and logprobs that do not fit together.",
        "Answer each held call once, with as many logprobs as ids.",
    ),
    "Unbridgeable": Remedy(
        "It cannot be proved that a call continues the tokens of an earlier one, so a new branch begins.",
        "Nothing is wrong with the rollout. docs/tokens.md lists the reasons and which templates avoid them.",
    ),
    "TemplateRefused": Remedy(
        "The model's chat template does not accept this conversation.",
        "Its own words are in the message; most often two messages of one role follow each other, or it has no tools.",
    ),
    "VerifierError": Remedy(
        "The verifier failed. There is no reward, which is not a reward of 0.",
        "`rollyard check tasks FOLDER` tries it on the task's solution; then `rollyard rescore {id}` judges again.",
    ),
    "RunnerNotStarted": Remedy(
        "The verifier's program could not be started, or ran no test.",
        "Put what it needs (pytest, an interpreter) into the task's image; then `rollyard rescore {id}`.",
    ),
    "EnvError": Remedy(
        "An environment or a tool server did not answer as it should.",
        "`rollyard show {id} --part events` has what it said.",
    ),
    "EnvRefused": Remedy(
        "The environment answered no; the message is its own.",
        "Send the action in the form that the environment's `/schema` describes.",
    ),
    "EnvUnavailable": Remedy(
        "The environment has no free place, or no server listens there.",
        "Wait and ask again, raise `rollyard serve env --capacity`, or correct the URL.",
    ),
    "EndpointAbsent": Remedy(
        "A server answers there, and has nothing at this path.",
        "Correct the path of the MCP server's address; most end in `/mcp`.",
    ),
    "UnknownTool": Remedy(
        "No server offers a tool of this name. Nothing was asked.",
        "Take one of the names in the message.",
    ),
    "EpisodeLost": Remedy(
        "The session is gone: its server was restarted, or it was not used for too long.",
        "Begin another episode with `reset`.",
    ),
    "SessionNotStarted": Remedy(
        "A rollout that an environment drives ended before its agent ran.",
        "`error.rollout` has the commands, their exit codes and their output.",
    ),
    "StoreError": Remedy(
        "The store could not be read or written: it is away, full, locked, damaged or of a newer version.",
        "Free disk space, or start the database; `rollyard check run {run}` looks at what was kept, and "
        "`rollyard run --resume {run}` goes on.",
    ),
    "LeaseLost": Remedy(
        "Another worker holds the attempt now, since this one gave no sign of life for too long.",
        "Nothing: the other one's result counts. If it happens often, raise `lease_s` or lower `--parallel`.",
    ),
    "Untrainable": Remedy(
        "A rollout with a reward has no token that may be trained on; the reasons are in the message.",
        "Use a policy that gives ids and logprobs (`tokens:URL` or a queue); docs/tokens.md says which do.",
    ),
    "RolloutsFailed": Remedy(
        "A trainer asked for a group of rollouts of which nothing, or not all that it needs, can be trained on.",
        "The message has the reasons of each attempt; `rollyard why last` has the evidence.",
    ),
    "RolloutsRefused": Remedy(
        "The rollout server said no; status, code and hint are its own.",
        "Correct the field that the message names; docs/rollouts-over-http.md has the requests.",
    ),
    "JobConflict": Remedy(
        "The same idempotency key came with another request.",
        "Use a new key for a new request.",
    ),
    "TooManyJobs": Remedy(
        "An owner has as many jobs under way as the rollout server gives.",
        "Wait until some have ended, or cancel them.",
    ),
    "JobNotFound": Remedy(
        "The rollout server has no such job, or it is another owner's.",
        "Look at the id, and at the key that you send.",
    ),
    "PlaneError": Remedy(
        "The control plane failed.",
        "Its log has the request's id. Ask again; if it stays, `rollyard plane events ID` shows what became of the instance.",
    ),
    "PlaneInvalid": Remedy(
        "A field of the request is wrong; the message names it.",
        "Correct it; `/openapi.json` describes every request.",
    ),
    "PlaneUnauthorized": Remedy(
        "There is no key, or it is unknown or revoked.",
        "Set `ROLLYARD_KEY`; an admin makes one with `rollyard plane new-key ROLE OWNER`.",
    ),
    "PlaneForbidden": Remedy(
        "The key is good and its role may not do this, or the thing is another owner's.",
        "Use a key of the owner, or an admin's.",
    ),
    "PlaneNotFound": Remedy(
        "There is no such environment, instance, key or path.",
        "Look at the id; `rollyard plane instances` lists what there is.",
    ),
    "PlaneConflict": Remedy(
        "Another request was first, the version is released, or an idempotency key came with another request.",
        "Read it again and repeat the change; for a released version make a new one.",
    ),
    "PlaneGone": Remedy(
        "The instance was there and has ended.",
        "`rollyard plane events ID` says why; make another, with a longer `ttl_s` if it expired.",
    ),
    "PlaneTooLarge": Remedy(
        "The request or the file is larger than the plane takes.",
        "Send large folders with `rollyard push`, which uses a signed URL.",
    ),
    "PlaneQuota": Remedy(
        "The owner has as many instances as its quota allows.",
        "Delete some (`rollyard plane instances --owner OWNER`), or have an admin raise it: `rollyard plane quota OWNER 200`.",
    ),
    "PlaneRateLimited": Remedy(
        "More creations a second than the owner's rate allows.",
        "Wait as long as `Retry-After` says; clients of ours do. An admin raises it: `rollyard plane quota OWNER --rate 10`.",
    ),
    "PlaneUnsupported": Remedy(
        "The engine cannot do it; the hint names what can.",
        "Choose another engine (`--engine` of `serve plane`).",
    ),
    "PlaneDraining": Remedy(
        "This replica stops and takes on nothing new.",
        "Ask again: another replica answers.",
    ),
    "PlaneUnavailable": Remedy(
        "The plane, or an engine behind it, did not answer as it should.",
        "Ask again. If it stays, `/ready` says which engine is away.",
    ),
}  # fmt: skip
_ROOTS: Mapping[Boundary, str] = {
    "sandbox": "SandboxError", "agent": "AgentError", "gate": "GateError", "policy": "PolicyError",
    "verifier": "VerifierError", "env": "EnvError", "store": "StoreError",
}  # fmt: skip


def remedy_of(cause: str, boundary: Boundary) -> str:
    """What to do about the error of this name; of one that is not ours, about its boundary."""
    return REMEDIES.get(cause, REMEDIES[_ROOTS[boundary]]).remedy
