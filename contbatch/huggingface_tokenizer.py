"""The tokenizer of a Hugging Face directory: tokenizer.json and the files beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from contbatch.errors import ModelFileError
from contbatch.text_file import read_json, read_text


def read_huggingface(path: Path) -> tuple[Backend, dict[str, Any]]:
    """Read tokenizer.json, or the directory it is in, with tokenizer_config.json and chat_template.jinja beside it.

    Returns
    -------
    backend : tokenizers.Tokenizer
    settings : dict
        Keyword arguments of `contbatch.tokenizer.Tokenizer`.

    Raises
    ------
    ModelFileError
        A file is missing or malformed, or names a special token that is not in the vocabulary.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise ModelFileError(f"{path}: not a tokenizer.json: {error}") from error
    # The file may carry the settings of the training run.
    backend.no_truncation()
    backend.no_padding()
    beside, jinja = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
    config = read_json(beside) if beside.exists() else {}
    return backend, {
        "bos_token_id": _token_id(backend, beside, config.get("bos_token")),
        "eos_token_id": _token_id(backend, beside, config.get("eos_token")),
        "add_bos": bool(config.get("add_bos_token", False)),
        "chat_template": read_text(jinja) if jinja.exists() else _template_text(beside, config),
    }


def _token_id(backend: Backend, path: Path, token: Any) -> int | None:
    name = token.get("content") if isinstance(token, dict) else token
    if name is None:
        return None
    token_id = backend.token_to_id(name) if isinstance(name, str) else None
    if token_id is None:
        raise ModelFileError(f"{path}: names the special token {token!r}, which is not in the vocabulary")
    return token_id


def _template_text(path: Path, config: Mapping[str, Any]) -> str | None:
    """Find the template in tokenizer_config.json: one text, or a list of named ones with a "default" among them."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{path}: chat_template must be text, got {template!r:.80}")
    return template
