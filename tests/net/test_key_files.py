"""Key files: made where there is none, the owner's alone, never empty."""

import os

import pytest

from rollyard.core.errors import ConfigError
from rollyard.net.key_files import read_key, read_or_make_key, state_file, write_key


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "deeper" / "key"
    key = read_or_make_key(path, "ryk")
    assert key.startswith("ryk") and read_or_make_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o644, 0o666])
def test_a_file_that_others_reach_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    write_key(path, "a-key")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others can read") as refused:
        read_or_make_key(path)
    assert "chmod 600" in str(refused.value.hint)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_mounted_secret_is_read_through_its_group_and_by_nobody_else(tmp_path):
    path = tmp_path / "key"
    write_key(path, "a-key")
    os.chown(path, 12345, os.getegid())
    path.chmod(0o440)
    assert read_key(path) == "a-key"
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(ConfigError):
            read_key(path)


@pytest.mark.parametrize("text", ["", " \n", "two words", "bell\a"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        read_or_make_key(path)


def test_a_file_that_cannot_be_read_or_made_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        read_or_make_key(tmp_path / "file" / "key")


def test_files_that_no_option_names_lie_in_the_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_file("gate.key") == tmp_path / "rollyard" / "gate.key"
