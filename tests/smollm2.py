"""The default model and what another implementation made of it; tests skip where they are absent."""

import json
from pathlib import Path

import pytest

from contbatch import catalog

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "smollm2_135m_f32_greedy.json"


def model_path():
    path = catalog.cached_path("smollm2-135m")
    if not path.exists():
        pytest.skip(f"{path.name} has not been fetched")
    return path


def golden():
    """Prompts with their token ids and the 64 greedy tokens that follow."""
    if not GOLDEN.exists():
        pytest.skip(f"{GOLDEN.name} is absent")
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
