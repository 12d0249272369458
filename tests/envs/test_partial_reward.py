"""Partial reward from what a verifier prints."""

import pytest

from rollyard.envs.fleet.partial_reward import fraction, partial

ERRORS = '>>> ERROR_ACCUMULATOR >>>\n["a", "b"]\n<<< ERROR_ACCUMULATOR <<<\n'
SUCCESSES = ">>> SUCCESS_ACCUMULATOR >>> ['c', 'd', 'e', 'f', 'g', 'h'] <<< SUCCESS_ACCUMULATOR <<<\n"


@pytest.mark.parametrize(
    ("stdout", "share"),
    [
        (ERRORS + SUCCESSES, 0.75),
        ("noise\n" + SUCCESSES + "more noise\n" + ERRORS, 0.75),
        (ERRORS, 0.0),
        (SUCCESSES, 1.0),
        ("nothing of the kind", 0.0),
        ("", 0.0),
        (">>> ERROR_ACCUMULATOR >>> [] <<< ERROR_ACCUMULATOR <<< >>> SUCCESS_ACCUMULATOR >>> [] ", 0.0),
        (">>> ERROR_ACCUMULATOR >>>\nApp mail: 1\nApp shop: 2\n>>> SUCCESS_ACCUMULATOR >>>\nApp mail: 1\n", 0.25),
        (">>> ERROR_ACCUMULATOR >>>\none line\n>>> SUCCESS_ACCUMULATOR >>>\nanother\n", 0.5),
        (">>> SUCCESS_ACCUMULATOR >>> [1, 2 <<< SUCCESS_ACCUMULATOR <<<" + ERRORS, 1 / 3),
    ],
)
def test_the_fraction_is_what_held_of_all_that_was_looked_at(stdout, share):
    """E7"""
    assert fraction(stdout) == pytest.approx(share)


def test_a_pass_stays_and_only_a_failed_run_gets_the_fraction():
    """E7: no accumulators = 0.0"""
    assert partial(1.0, ERRORS + SUCCESSES) == 1.0
    assert partial(0.5, ERRORS + SUCCESSES) == 0.5
    assert partial(0.0, ERRORS + SUCCESSES) == 0.75
    assert partial(0.0, "") == 0.0
    assert partial(None, ERRORS + SUCCESSES) is None, "what was not scored is not scored in part"
