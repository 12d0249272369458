"""The evaluation that docs/evaluation.md prints loads."""

from __future__ import annotations

import re
from pathlib import Path

from rollyard.runs.run.config import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evaluation.md"


def test_the_example_evaluation_loads(tmp_path):
    text = next(one for one in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.S) if "agents =" in one)
    (tmp_path / "eval.toml").write_text(text.replace("examples/", f"{ROOT}/examples/"))
    config = load(str(tmp_path / "eval.toml"))
    assert config.agents == ("pi", "codex")
    assert config.prices["small"].completion == 0.4
    assert config.concurrency == {"small": 4}
