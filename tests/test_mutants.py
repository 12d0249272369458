"""The list of `make mutants` fits the code: a mutant of a line that is gone would guard nothing."""

from tests.mutants import MUTANTS, Mutant, find_misfit


def test_every_mutant_can_be_made_of_the_code_as_it_is():
    assert [why for mutant in MUTANTS if (why := find_misfit(mutant)) is not None] == []


def test_a_line_that_is_gone_is_told():
    assert "0 times: 'gone()'" in str(find_misfit(Mutant("core/ids.py", "gone()", "", "tests")))
    assert find_misfit(Mutant("core/gone.py", "gone()", "", "tests")) == "core/gone.py is not there"
