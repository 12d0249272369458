"""A string where a sequence is meant: one command, or refused by the field's name."""

import msgspec
import pytest

import rollyard as ry
from rollyard.core.agent import Addition, Agent, LayerSpec, Mcp
from rollyard.core.errors import ConfigError
from rollyard.core.sequences import as_commands, as_tuple
from rollyard.core.task import Artifact, McpServer, Site, Step, Task, VerifierSpec
from rollyard.images import ImageStore
from rollyard.runs import RunConfig
from rollyard.tools import Toolset

TASK = {"id": "t", "instruction": "x"}
REFUSED = [
    (Task, "layers", TASK),
    (Task, "allowed_hosts", TASK),
    (Task, "artifacts", TASK),
    (Task, "files", TASK),
    (Site, "layers", {}),
    (Step, "allowed_hosts", {"name": "s", "instruction": "x"}),
    (VerifierSpec, "tests", {"kind": "pytest"}),
    (VerifierSpec, "collect", {"kind": "pytest"}),
    (Artifact, "exclude", {"source": "x"}),
    (McpServer, "command", {"name": "m"}),
    (ry.SandboxSpec, "layers", {}),
    (ry.SandboxSpec, "mounts", {}),
    (ry.Resources, "gpu_types", {}),
    (RunConfig, "agents", {}),
    (RunConfig, "filter", {}),
    (RunConfig, "disabled_tools", {}),
    (LayerSpec, "npm", {}),
    (LayerSpec, "pip", {}),
    (Addition, "argv", {}),
    (Mcp, "transports", {"style": "claude", "file": "x"}),
    (Agent, "argv", {"name": "a"}),
    (Agent, "check", {"name": "a"}),
    (Agent, "artifacts", {"name": "a"}),
]


@pytest.mark.parametrize(("kind", "field", "others"), REFUSED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_string_is_no_sequence(kind, field, others):
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field}: a list, not 'true'"):
        kind(**others, **{field: "true"})
    with pytest.raises(ConfigError, match=field):
        msgspec.structs.replace(kind(**others), **{field: "true"})
    kind(**others, **{field: ()})


def test_one_shell_command_is_a_sequence_of_one():
    assert Task(**TASK, setup="make all").setup == ("make all",)
    assert as_commands("make all", "setup") == ("make all",)
    assert as_commands(["a", "b"], "setup") == ("a", "b")
    for wrong in ([1], {"a": 1}, b"make", 7):
        with pytest.raises(ConfigError, match="setup"):
            as_commands(wrong, "setup")


def test_what_is_iterable_becomes_a_tuple():
    assert as_tuple((n for n in range(3)), "numbers") == (0, 1, 2)
    for wrong in ("ab", b"ab", {"a": 1}, 7):
        with pytest.raises(ConfigError, match="numbers: a list, not"):
            as_tuple(wrong, "numbers")


@pytest.mark.anyio
async def test_python_functions_refuse_strings_by_name(tmp_path):
    for name in ("npm", "pip"):
        with pytest.raises(ConfigError, match=f"{name}: a list"):
            await ImageStore(tmp_path).layer(**{name: "left-pad"})
    with pytest.raises(ConfigError, match="tools: a list"):
        Toolset("tool")
    for backend, options in (("local", {}), ("docker", {"host": "unix:///nowhere"})):
        with pytest.raises(ConfigError, match="mounts: a list"):  # "/" of "/data" would allow every directory there is
            ry.sandbox.backend(backend, mounts="/data", **options)
