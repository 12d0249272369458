"""Answers that know nothing of a task: what they put into the files that a question names."""

import json
import subprocess

import pytest

from rollyard.core.task import Task
from rollyard.testing.trivial_answers import trivial_answers

QUESTION = """Read `{root}/input.csv` and save `{root}/report.json` in this form:

```json
{{"peak": "14:00", "ports": [22, 445]}}
```

- `peak`: String, the hour with the most entries
- `ports`: Array of numbers
- `total`: how many

Write a program `{root}/solve.py` with a function `count(rows)`, and a summary to {root}/summary.txt:

```
total=3
```
"""


@pytest.fixture
def answers(tmp_path):
    """What the files hold after each kind of answer."""

    def give(kind):
        (tmp_path / "input.csv").write_text("the task's own\n")
        (tmp_path / "solve.py").write_text("def count(rows): ...\n")
        task = Task(id="one", instruction=QUESTION.format(root=tmp_path))
        subprocess.run(["sh", "-c", trivial_answers(task)[kind]], check=True, cwd=tmp_path, timeout=60)
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    return give


def test_an_echoing_answer_is_the_example_of_the_question(answers):
    found = answers("an echoing")
    assert json.loads(found["report.json"]) == {"peak": "14:00", "ports": [22, 445]}
    assert found["summary.txt"] == "total=3\n"
    assert "return args[0]" in found["solve.py"]


def test_a_constant_answer_has_the_fields_that_are_named(answers):
    found = answers("a constant")
    assert json.loads(found["report.json"]) == {"peak": "value", "ports": ["value"], "total": 42}
    assert "return 0" in found["solve.py"]


@pytest.mark.parametrize("kind", ["an empty", "a constant", "an echoing"])
def test_what_the_task_gives_stays_as_it_is(answers, kind):
    assert answers(kind)["input.csv"] == "the task's own\n"


def test_an_empty_answer_is_empty(answers):
    found = answers("an empty")
    assert found["report.json"] == found["summary.txt"] == found["solve.py"] == ""
