"""Chat templates: Jinja programs that come with a model and turn messages into a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contbatch.checks import shown
from contbatch.errors import InvalidRequestError, ModelFileError


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant said; for a prompt its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise InvalidRequestError(f"the chat template refuses these messages: {message}")


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that templates are written for: the one of transformers' apply_chat_template."""
    extensions = [_GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class ChatTemplate:
    """A compiled template. It runs in Jinja's sandbox, because it is code from whoever published the model.

    Parameters
    ----------
    text : str
        Jinja source.
    source : str
        The file it comes from, for messages.
    """

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        try:
            self._template = _environment().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ModelFileError(f"{source}: the chat template is malformed: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Make the prompt.

        Parameters
        ----------
        messages : sequence of mapping
            Each with a text "role" and a text "content"; further keys are passed on.
        **variables
            What else the template may use, such as `add_generation_prompt` or `bos_token`.

        Raises
        ------
        InvalidRequestError
            Messages of another form, or the template refuses them.
        ModelFileError
            The template fails, or tries what the sandbox forbids.
        """
        values = {"tools": None, "documents": None, **variables, "messages": _check(messages)}
        try:
            return self._template.render(values)
        except InvalidRequestError:
            raise
        except Exception as error:  # A template can fail in as many ways as a program.
            raise ModelFileError(
                f"{self._source}: the chat template failed: {type(error).__name__}: {error}"
            ) from error


def _check(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        form = 'a non-empty list such as [{"role": "user", "content": "Hello"}]'
        raise InvalidRequestError(f"messages must be {form}, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{i}] must be a mapping with role and content, got {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidRequestError(f"messages[{i}][{key!r}] must be text, got {shown(message.get(key))}")
    return [dict(message) for message in messages]
