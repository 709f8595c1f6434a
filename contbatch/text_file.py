"""Small text files: read whole, with errors that name them."""

import json
from pathlib import Path
from typing import Any

from contbatch.errors import ModelFileError


def read_text(path: Path) -> str:
    """Read a UTF-8 file; one that is missing or not UTF-8 raises `ModelFileError` with its path."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing, malformed or other file raises `ModelFileError` with its path."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
