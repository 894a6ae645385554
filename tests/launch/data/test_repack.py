import json
import re
from pathlib import Path

import pytest

from launch.cli import main


def test_repack_gives_rows_of_another_length(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "repack", str(folder / "set"), "--out", str(tmp_path / "set"), "--seq-len", "48"]
    assert main([*arguments, "--workers", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"row +48 tokens", text)
    assert text.splitlines()[-1].startswith("built in ")
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["row_tokens"], shown["path"]) == (48, str(tmp_path / "set"))
