"""The README's Python blocks run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block(code, capsys):
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "residual" in capsys.readouterr().out
    if "result" in names:
        assert names["result"]["residual"].zero_channels == 16
        assert names["masks"]["heads"] == names["result"]["heads"].ids
    else:
        assert names["optimizer"].phase == "healing"
        assert len(names["optimizer"].masks()["residual"]) == 16
