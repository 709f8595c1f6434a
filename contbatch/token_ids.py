"""Token ids of a request from outside: its prompt, and those that end its answer. Standard library only."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from contbatch.checks import is_int, python_number, require, tuple_of


def prompt_length(request_id: int | str, token_ids: Sequence[int] | None, length: int | None) -> int:
    """Return the length of a prompt that is given as token ids or as a length; `InvalidRequestError` if it is not."""
    if (token_ids is None) == (length is None):
        given = "given prompt_token_ids or num_prompt_tokens, one of the two"
        require(False, f"request {request_id!r}", (token_ids, length), given)
    if token_ids is not None:
        if not _is_sequence(token_ids):
            _refuse(request_id, token_ids)
        length = len(token_ids)
    if not is_int(length, 1):
        length = python_number(length)
        require(is_int(length, 1), f"the prompt length of request {request_id!r}", length, "an integer ≥ 1")
    return length or 0


def _refuse(request_id: int | str, token_ids: object) -> None:
    if isinstance(token_ids, (list, tuple)):
        token = next(token for token in token_ids if not _is_token(token))
        require(False, f"a token id in the prompt of request {request_id!r}", token, "an integer ≥ 0")
    require(False, f"prompt_token_ids of request {request_id!r}", token_ids, "a list of token ids")


def _is_token(token: object) -> bool:
    return is_int(python_number(token), 0)


def _is_sequence(token_ids: object) -> bool:
    """Whether slices can be taken of it and a list holds token ids; what else it is, a model looks at itself."""
    if isinstance(token_ids, (list, tuple)):
        if {*map(type, token_ids)} == {int}:
            return bool(min(token_ids) >= 0)
        return all(map(_is_token, token_ids))
    return _is_sliced(type(token_ids)) and getattr(token_ids, "ndim", 1) == 1  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _is_sliced(kind: type) -> bool:
    sliced = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    return sliced and not issubclass(kind, (str, bytes, Mapping))


def end_tokens(request_id: int | str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return `Request.eos_token_ids` as a tuple; `InvalidRequestError` unless they are a sequence of integers ≥ 0."""
    if isinstance(token_ids, tuple) and not token_ids:
        return ()
    name, limit = f"eos_token_ids of request {request_id!r}", "a sequence of integers ≥ 0"
    given = tuple(map(python_number, tuple_of(token_ids, name, limit)))
    require(all(is_int(token, 0) for token in given), name, token_ids, limit)
    return given
