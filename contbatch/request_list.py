"""Prompts made into requests."""

from collections.abc import Iterable, Sequence
from typing import Any

from contbatch.checks import require
from contbatch.errors import InvalidRequestError
from contbatch.prompts import Prompt, encode, listed
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams
from contbatch.tokenizer import Tokenizer

FIELDS = ("priority", "client_id", "ttft_target_s", "tpot_target_s", "expected_output_tokens", "cache_salt")
"""What may be said of requests besides prompt, sampling and arrival: see `Request`."""


def make_requests(
    prompts: Prompt | Iterable[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    arrival_times: Sequence[float] | None,
    fields: dict[str, Any],
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
) -> list[Request]:
    """Make a request of each prompt, numbered from 0; `fields` are of `FIELDS`, one value for all or a list.

    Raises
    ------
    InvalidRequestError
        An empty or malformed prompt, an unknown field, or lists of another length than the prompts.
    """
    unknown = sorted(set(fields) - set(FIELDS))
    require(not unknown, "a field of requests", ", ".join(unknown), f"one of {', '.join(FIELDS)}")
    given = listed(prompts)
    require(
        arrival_times is None or isinstance(arrival_times, Iterable),
        "arrival_times",
        arrival_times,
        "a list of seconds, one for each prompt",
    )
    samplings = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(given)
    arrivals = [0.0] * len(given) if arrival_times is None else list(arrival_times)
    each = {name: value if isinstance(value, list) else [value] * len(given) for name, value in fields.items()}
    lists: dict[str, list[Any]] = {"sampling parameters": samplings, "arrival times": arrivals, **each}
    for name, values in lists.items():
        if len(values) != len(given):
            raise InvalidRequestError(f"{len(given)} prompts, but {len(values)} {name}")
    return [
        Request(
            number,
            encode(prompt, tokenizer),
            samplings[number],
            arrival_time=arrivals[number],
            eos_token_ids=eos_token_ids,
            **{name: values[number] for name, values in each.items()},
        )
        for number, prompt in enumerate(given)
    ]
