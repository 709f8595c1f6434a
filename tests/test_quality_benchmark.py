"""Which files `benchmarks/quality.py` reads."""

import subprocess
import sys
from pathlib import Path

import pytest

QUALITY = Path(__file__).parents[1] / "benchmarks" / "quality.py"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.txt", None, "No such file or directory"),
        ("empty.txt", b" \n", "nothing in it"),
        ("codes.bin", b"\xff\xfe\x00", "can't decode byte 0xff"),
    ],
)
def test_a_file_without_text_is_named(name, content, reason, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run([sys.executable, QUALITY, "--text", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"no text to read in {path}" in done.stderr
    assert reason in done.stderr
