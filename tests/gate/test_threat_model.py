"""The threat model names a test for each claim; a name that leads nowhere is a claim without proof."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_every_test_named_in_the_threat_model_exists():
    text = (TESTS.parent / "docs" / "threat-model.md").read_text()
    known = {
        name: path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"\b(test_\w+)(?!\w|\.py)`", text))
    assert len(named) > 25
    assert named <= set(known), named - set(known)
    files = set(re.findall(r"`(\w+/test_\w+\.py)", text))
    assert all((TESTS / file).exists() for file in files)
