"""The facade: a model by name, prompts in, answers out."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from contbatch.backends import BACKENDS, PRECISION, require_backend, require_limits, within
from contbatch.beam_search import BeamSearchParams, beam_search
from contbatch.catalog import fetch
from contbatch.decision_log import DecisionLog
from contbatch.doctor import missing_packages_named
from contbatch.engine_run import OnFinish
from contbatch.errors import InvalidRequestError
from contbatch.metrics import Result
from contbatch.output import RequestOutput
from contbatch.policies import ChunkedPrefill, Policy
from contbatch.policies.lockstep import Lockstep
from contbatch.progress import progress_bar
from contbatch.prompts import Messages, Prompt, listed, parts
from contbatch.provenance import provenance_of_requests
from contbatch.request import Request, RequestStatus
from contbatch.request_list import make_requests
from contbatch.sampling_params import SamplingParams
from contbatch.stream import TextStream
from contbatch.text_engine import TextEngine, new_engine, output_of, output_of_beams
from contbatch.tokenizer import load_tokenizer


class LLM:
    """A model that answers prompts, many at a time.

    Parameters
    ----------
    model : str or path
        A name of the catalogue ("smollm2-135m"), a GGUF file, or a Hugging Face directory. The first use downloads
        and exports it into the cache (`contbatch.catalog.cache_dir`).
    backend : {"cpu", "reference", "tensorrt"}
        "cpu": OpenVINO with a Numba attention kernel. "reference": ONNX's evaluator, very slow, exactly the standard.
        "tensorrt": an NVIDIA GPU, see docs/tensorrt.md. **Never run on a GPU**: only its protocol is tested, on a fake.
    precision : {"f32", "f16", "bf16", "w8a8"}, optional
        Of the linear layers and the pages: "cpu" f32 (its default), bf16, or w8a8 (8 bits, pages in int8),
        "reference" f32, "tensorrt" f16 (its default), bf16, or w8a8 (but pages in f16).
    kv_dtype : {"f32", "bf16", "int8"}, optional
        Another type for the pages. Only "cpu" takes one.
    policy : Policy
        Of `generate`, `chat` and `stream`; `ChunkedPrefill()` if None.
    num_pages, page_size : int
        The page pool; on "tensorrt", num_pages may be a fraction, in (0, 1), of the memory that the model leaves free.
    max_num_seqs, max_num_batched_tokens : int
        Seats, and the token budget of a step.
    prefix_cache : bool
        Whether prompts that begin alike share the pages of that beginning, also with answered ones.
    num_host_pages : int
        Pages in host memory for requests that are preempted; without room there they are computed again.
    layout : {"paged", "contiguous"}
        Whether a request's pages lie anywhere or side by side, see `Scheduler`.
    num_threads : int, optional
        All cores if None. Only "cpu" takes a number.
    attention : {"paged", "gather"}
        "gather", on "tensorrt" alone: ONNX's own operators in place of our plugin, slower, see docs/tensorrt.md.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        backend: str = "cpu",
        precision: str | None = None,
        kv_dtype: str | None = None,
        policy: Policy | None = None,
        num_pages: int | float = 1024,
        page_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        prefix_cache: bool = False,
        num_host_pages: int = 0,
        layout: str = "paged",
        num_threads: int | None = None,
        attention: str = "paged",
    ) -> None:
        num_threads = require_backend(backend, attention, precision, kv_dtype, num_threads)
        self.policy = ChunkedPrefill() if policy is None else policy
        limits: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "num_host_pages": num_host_pages}
        limits |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        limits |= {"prefix_cache": prefix_cache, "layout": layout}
        self._limits = require_limits(backend, self.policy, limits)
        precision = precision or PRECISION[backend]
        options: dict[str, Any] = {"precision": precision, "kv_dtype": kv_dtype, "num_threads": num_threads}
        options |= {} if attention == "paged" else {"attention": attention}  # results saved without it stay the same
        with missing_packages_named():
            source = fetch(model)
            self._identity = {"model": source.name, "backend": backend, **options}
            self.tokenizer = load_tokenizer(source)
            self.runner = BACKENDS[backend](source, self._limits, **options)
        self.config = self.runner.model.config
        self._limits |= {"max_model_len": self.config.max_position, "num_pages": self.runner.model.num_pages}
        self._engine = TextEngine(partial(new_engine, self.runner, self.policy, self._limits), self.tokenizer)

    # ---- answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts (text, token ids or conversations) together; outputs in the order of the prompts.

        A request that fails on the way gets the finish reason "error" and its `error`; the others go on. If
        interrupted, all pages are given back and the next call works. With `SamplingParams.n` > 1 an output is the
        first, or with `best_of` the best, of n answers; all are in its `choices`.

        Parameters
        ----------
        prompts : a prompt, or an iterable of prompts
        sampling : SamplingParams, or one per prompt
        progress : bool
            Show a bar of answered prompts (TQDM_DISABLE=1 in the environment hides it).

        Raises
        ------
        InvalidRequestError
            A prompt is empty, malformed or too long to ever run; nothing has been started then.
        """
        requests = live = self.requests(prompts, sampling)
        try:
            self._engine.submit(requests)
            with progress_bar(len(requests), "prompt", progress) as bar:
                while live:
                    self._engine.step()
                    left = [r for r in live if any(s.status is not RequestStatus.FINISHED for s in r.samples)]
                    bar.update(len(live) - len(left))
                    live = left
        except BaseException:
            self._engine.abandon(requests)
            raise
        return [self.output(r) for r in requests]

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, [{"role": "user", "content": "Hi"}], through the chat template as `generate` does."""
        conversations = [given if isinstance(given, str) else parts(given) for given in listed(messages)]
        for told in conversations:
            if isinstance(told, str) or not all(isinstance(message, Mapping) for message in told):
                raise InvalidRequestError(f"a conversation is a list of role and content, got {told!r}")
        return self.generate(conversations, sampling, progress=progress)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> TextStream:
        """Answer one prompt or conversation piece by piece: an iterator of text deltas.

        Their concatenation is the answer's text. The request is queued at once; leaving the loop early, closing or
        forgetting the stream aborts it. Other calls may run meanwhile: they share its batches.
        """
        [request] = self.requests([prompt], sampling)
        if (n := request.sampling.num_samples) > 1:
            raise InvalidRequestError(f"a stream gives one answer, got n = {n}")
        return TextStream(self._engine, request)

    def beam_search(self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """Find the likeliest answers; `choices` of an output are all `beam_width`. Needs all pages, as `run` does."""
        requests = self.requests(prompts)
        make = partial(new_engine, self.runner, Lockstep(), self._limits)
        with self._engine.replaced(make, "beam_search") as engine:
            found = beam_search(engine.scheduler, self.runner, requests, params)
        return [output_of_beams(r, beams, self.tokenizer) for r, beams in zip(requests, found, strict=True)]

    # ---- experiments ---------------------------------------------------------------------------------------------

    def requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_times: Sequence[float] | None = None,
        **fields: Any,
    ) -> list[Request]:
        """Make requests for `run`, numbered from 0, each with its own or the common sampling and an arrival in seconds.

        `fields`: see `request_list.FIELDS`, such as `priority`; one value for all, or a list with one for each.
        """
        ends = (self.config.eos_token_id, self.tokenizer.eos_token_id, *self.config.extra_eos_token_ids)
        eos = [token for token in ends if token is not None]
        return make_requests(prompts, sampling, arrival_times, fields, self.tokenizer, eos)

    def run(
        self,
        requests: Iterable[Request],
        policy: Policy | None = None,
        *,
        num_pages: int | None = None,
        num_host_pages: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        prefix_cache: bool | None = None,
        layout: str | None = None,
        log: DecisionLog | None = None,
        on_finish: OnFinish | None = None,
        progress: bool = False,
        live: bool | None = None,
    ) -> Result:
        """Run requests under a policy from a clock at zero, and return the tables of the run; see `Engine.run`.

        The tokens are in each request's `output_token_ids`; `output` makes text of them. Limits left out are those of
        this LLM; none may exceed its pages. A prefix cache begins empty, and that of this LLM is emptied. A new `log`
        is told every decision; `on_finish` makes the requests that follow others. `live`: see `contbatch.run`.

        Raises
        ------
        RunnerError
            A stream or another thread's call is still going on: its pages are in use.
        """
        limits: dict[str, Any] = {"num_pages": num_pages, "max_num_seqs": max_num_seqs, "prefix_cache": prefix_cache}
        limits |= {"max_num_batched_tokens": max_num_batched_tokens, "num_host_pages": num_host_pages, "layout": layout}
        chosen = within(self._limits, limits)
        make = partial(new_engine, self.runner, policy or self.policy, {**self._limits, **chosen}, log=log)
        told = partial(provenance_of_requests, self, policy or self.policy, chosen)
        return self._engine.run(make, requests, on_finish, told, progress=progress, live=live)

    def description(self) -> dict[str, Any]:
        """Say which model this is and how it runs, for `Experiment.hash`."""
        return {**self._identity, "kv_dtype": getattr(self.runner.model, "kv_dtype", None), **self._limits}

    def output(self, request: Request) -> RequestOutput:
        """Return the answer of a request of `run` as far as it has come, its text cut before a stop string."""
        return output_of(request, self.tokenizer)

    @property
    def num_free_pages(self) -> int:
        """Pages that no live request holds."""
        return self._engine.num_free_pages

    def close(self) -> None:
        """Free the model and its pages; idempotent. Later calls raise `RunnerError`."""
        self.runner.close()

    def __repr__(self) -> str:
        told = "{model}: {backend} {precision}, {num_pages} pages of {page_size} tokens, {max_num_seqs} seats"
        return f"<LLM {told.format(**self._identity, **self._limits)}, {self.policy!r}>"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
