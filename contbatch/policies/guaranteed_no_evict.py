"""TensorRT-LLM's careful one."""

from dataclasses import dataclass

from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class GuaranteedNoEvict(ChunkedPrefill):
    """Admit a request only if it and all others running can go to their ends: nobody is ever preempted.

    GUARANTEED_NO_EVICT, the default of TensorRT-LLM's capacity scheduler: requests wait, first come first served, until
    the pages of prompt + max_tokens are free beyond what those running will still need; generation goes before prompts
    in the token budget. Simplified: the pages are taken at admission rather than counted, which admits the same.
    """

    steady = True
    decodes = "first"

    def reserve(self, request: Request) -> int:  # noqa: D102
        return request.max_kv_tokens
