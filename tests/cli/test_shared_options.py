"""The options of a verb reach what they are for: a struct is filled by the names of its parameters, and no field is forgotten."""

import inspect
from importlib import import_module

import msgspec
import pytest

from rollyard.cli.shared_options import fill


class Wanted(msgspec.Struct, kw_only=True):
    name: str = "default"
    count: int = 5
    flag: bool = True
    parts: tuple[str, ...] = ("a",)
    other: str | None = None


def test_what_was_given_is_taken_and_what_was_not_keeps_its_default():
    assert fill(Wanted, {"name": None, "count": None, "stranger": 1}) == Wanted()


def test_empty_values_are_values_and_lists_become_tuples():
    given = {"name": "", "count": 0, "flag": False, "parts": ["b", "c"]}
    assert fill(Wanted, given) == Wanted(name="", count=0, flag=False, parts=("b", "c"))


def test_a_field_with_another_name_or_form_is_given_by_itself():
    assert fill(Wanted, {"name": "n", "other": "o"}, other="mine", name=None) == Wanted(name=None, other="mine")


# the verb, the struct it fills, and the fields that no parameter of the same name gives
VERBS = [
    ("serve:gate", "rollyard.runs.serve_gate:GateOptions", set()),
    ("serve:env", "rollyard.runs.serve_env:EnvOptions", {"limits", "coding"}),
    ("serve:rollouts", "rollyard.train.service.serve:RolloutsOptions", {"answers"}),
    ("serve:browser", "rollyard.runs.serve_browser:BrowserOptions", {"limits"}),
    ("serve:model", "rollyard.train.serve_model:ModelOptions", set()),
    ("serve:plane", "rollyard.plane.server.serve:PlaneOptions", {"engines", "compat"}),
    ("run:run", "rollyard.runs.run.command:RunRequest", {"agents", "policies", "files", "options"}),
    ("branch:branch", "rollyard.runs.branch:BranchRequest", {"options"}),
    ("make_tasks:make_tasks", "rollyard.testing.make_tasks:MakeOptions", set()),
    ("check:dataset", "rollyard.testing.tasks:CheckOptions", {"filter", "allow_unsafe"}),
]


@pytest.mark.parametrize(("verb", "struct", "apart"), VERBS, ids=[verb for verb, *_ in VERBS])
def test_every_field_has_a_parameter_of_its_name(verb, struct, apart):
    module, _, name = verb.partition(":")
    parameters = inspect.signature(getattr(import_module(f"rollyard.cli.{module}"), name)).parameters
    home, _, kind = struct.partition(":")
    fields = set(getattr(import_module(home), kind).__struct_fields__)
    assert fields - set(parameters) == apart
