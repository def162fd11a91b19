"""What the server takes for a key, its clients take for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.chat_client import read_key
from pagemill.errors import UsageError
from pagemill.key_file import numbered_keys
from pagemill.serve import read_keys

CONTENT = "# of the team, since May\n\n  #sk-old\n  sk-one \n#sk-older\r\nsk-two#2\n"


def test_blank_lines_and_comments_are_no_keys_and_lines_keep_their_numbers() -> None:
    assert list(numbered_keys(CONTENT)) == [(4, "sk-one"), (6, "sk-two#2")]


def test_the_first_key_that_a_server_takes_is_the_one_that_its_clients_send(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(CONTENT)
    assert read_keys("--api-key-file", str(file)) == ("sk-one", "sk-two#2")
    assert read_key(str(file), "--api-key-file") == "sk-one"


def test_a_file_of_comments_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# sk-one\n#sk-two\n")
    assert read_key(str(file), "--api-key-file") == ""
    with pytest.raises(UsageError, match="holds no key"):
        read_keys("--api-key-file", str(file))
