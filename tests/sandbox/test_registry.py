"""A backend by name: unknown names and options are refused with what there is."""

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName


def test_an_unknown_backend_or_option_names_those_that_exist():
    with pytest.raises(UnknownName, match="no sandbox backend named 'lcoal'; did you mean 'local'"):
        ry.sandbox.backend("lcoal")
    with pytest.raises(ConfigError, match="no option 'nonsense'; it takes: .*level"):
        ry.sandbox.backend("local", nonsense=1)
