"""Plain prompts: CSV, JSON Lines or Parquet rows with a prompt, and an answer or a command that judges.

The agent answers in `/app/answer.txt`. A row's `answer` must be equal to it, by words and numbers; a row's `verify` is a shell
command (or a list of them) that must succeed.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollyard.core.errors import ConfigError
from rollyard.core.sequences import as_commands
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import WORKDIR, Row, first_row, reward_script, row_drafts, text_field, write_task

_ANSWER = f"{WORKDIR}/answer.txt"
_CHECK = f"python3 -I /tests/answer_check.py {_ANSWER} /tests/answer.txt"
_PROMPTS = ("prompt", "question", "instruction", "problem", "input")
_ANSWERS = ("answer", "expected", "target", "output", "solution")


def recognise(source: Path) -> bool:
    row = first_row(source)
    if not any(name in row for name in _PROMPTS) or {"entry_point", "test_list", "base_commit"} & row.keys():
        return False
    return "verify" in row or any(name in row for name in _ANSWERS)


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`prompt` and `answer` name the columns where they are called otherwise."""
    return row_drafts(source, _name, partial(_write, options))


def _name(number: int, row: Row) -> str:
    return str(row.get("id") or row.get("task_id") or f"{number:05}")


def _write(options: Mapping[str, Any], row: Row, folder: Path) -> None:
    prompt = text_field(row, *([str(options["prompt"])] if "prompt" in options else _PROMPTS))
    tests: dict[str, str | bytes] = {}
    solution: dict[str, str | bytes] = {}
    if row.get("verify"):
        commands = list(as_commands(row["verify"], "verify"))
    else:
        answer = text_field(row, *([str(options["answer"])] if "answer" in options else _ANSWERS))
        if not answer.split():
            raise ConfigError("the row's answer is empty, so doing nothing would pass")
        commands = [_CHECK]
        tests["answer.txt"] = answer
        tests["answer_check.py"] = importlib.resources.files("rollyard.inside").joinpath("answer_check.py").read_bytes()
        solution = {"solve.sh": f"#!/bin/sh\ncp /solution/answer.txt {_ANSWER}\n", "answer.txt": answer}
    joined = " && ".join(f"({command})" for command in commands)
    tests["test.sh"] = reward_script(joined)
    table = {
        "metadata": {
            "rollyard": {
                "verifier": "commands",
                "options": {"commands": commands, "score": "all", "timeout_s": 60.0},
                "grade": "sealed",
                "image": str(options.get("image", "host")),
            }
        },
        "environment": {"workdir": WORKDIR},
        "agent": {"timeout_sec": 600.0},
    }
    rule = f"\n\nWrite the answer, and nothing else, into {_ANSWER}."
    write_task(
        folder, instruction=prompt + ("" if row.get("verify") else rule), table=table, tests=tests, solution=solution
    )


adapter = Adapter(
    about="rows of prompts with an answer, or with a command that judges (CSV, JSON Lines, JSON, Parquet)",
    get="any file with a column prompt (question, instruction ...) and a column answer (expected, target ...) or verify",
    recognise=recognise,
    read=read,
    needs=("python3",),
    options=("answer", "image", "prompt"),
    carries=("answer_check.py",),
)
