"""A runner whose pages hold markers in place of keys and values, so that a wrong page is seen, not guessed."""

from collections import Counter

from invariants import CheckedScheduler

from contbatch.engine import Engine, StepResult
from contbatch.inputs import pack
from contbatch.policies import ChunkedPrefill
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams

VOCABULARY = 7
STEP_S, TOKEN_S = 1.0, 0.125


def next_token(tokens):
    """Return the token after `tokens`: any change of any of them may change it."""
    return hash(tuple(tokens)) % VOCABULARY


def solo(request):
    """Return output tokens and finish reason of a request that has the model to itself."""
    tokens, output = list(request.prompt_token_ids), []
    while len(output) < request.sampling.max_tokens:
        output.append(next_token(tokens + output))
        if output[-1] in request.stop_ids:
            return output, "stop"
    return output, "length"


class FakeRunner:
    """Computes `next_token` from what it finds in its pages.

    A slot holds (owner, tokens up to and with its own). Without a prefix cache the owner is the request since it was
    last preempted: content left over from before is as wrong as another request's. With one it is the salt: a page of
    others will do if all tokens before and in it are equal.

    Parameters
    ----------
    num_pages, page_size : int
    shares : bool
        Whether there is a prefix cache.
    crash : set of int
        Calls of `execute`, from 0, that raise half way.
    poison : dict from request id to int
        After that many output tokens, a request gets an error in place of its next token.
    """

    is_virtual = True

    def __init__(self, num_pages, page_size, shares=False, *, crash=(), poison=()):
        self.num_pages, self.page_size, self.shares = num_pages, page_size, shares
        self.slots = [[None] * page_size for _ in range(num_pages)]
        self.crash, self.poison = set(crash), dict(poison)
        self.calls = 0
        self.steps = []
        """(grants as plain tuples, elapsed_s) of every step computed."""

    def validate(self, request):
        request.token_ids(0, 1)

    def execute(self, step):
        inputs = pack(step)
        ends, batch = inputs.cumulative_sequence_length.tolist(), inputs.input_ids.tolist()
        rows = list(zip(step.grants, inputs.past_seqlens.tolist(), inputs.block_table.tolist(), strict=True))
        assert ends[0] == 0
        assert ends[-1] == len(batch) == step.num_tokens
        for (request, *_), past, table in rows:
            self._read(request, past, table)
        self._require_sole_writers(ends, rows)
        self.calls += 1
        for row, ((request, *_), past, table) in enumerate(rows):
            if self.calls - 1 in self.crash and row == len(rows) // 2:
                raise RuntimeError(f"call {self.calls - 1} crashed")
            new = batch[ends[row] : ends[row + 1]]
            markers = self._markers(request, [*self._read(request, past, table), *new])[past:]
            for position, marker in enumerate(markers, past):
                page = table[position // self.page_size]
                assert 0 <= page < self.num_pages, f"{request} writes to page {page}"
                self.slots[page][position % self.page_size] = marker
        tokens, errors = {}, {}
        sampled = dict(zip((r.request_id for r in inputs.sampled), inputs.logits_indices.tolist(), strict=True))
        for row, ((request, *_), past, table) in enumerate(rows):
            known = self._read(request, past + ends[row + 1] - ends[row], table)
            if (last := sampled.get(request.request_id)) is not None:
                assert last == ends[row + 1] - 1, "sampled from another row than the last"
                if self.poison.get(request.request_id) == request.num_output_tokens:
                    errors[request.request_id] = ValueError(f"{request.request_id} is poisoned")
                else:
                    tokens[request.request_id] = next_token(known)
        elapsed_s = STEP_S + TOKEN_S * len(batch)
        self.steps.append(([(r.request_id, *rest) for r, *rest in step.grants], elapsed_s))
        return StepResult(tokens, elapsed_s, errors)

    def _require_sole_writers(self, ends, rows):
        """A page written in this step is used once, as the operator's contract demands."""
        used, written = Counter(), set()
        for row, (_, past, table) in enumerate(rows):
            stop = past + ends[row + 1] - ends[row]
            used.update(table[: -(-stop // self.page_size)])
            written.update(table[past // self.page_size : -(-stop // self.page_size)])
        assert {page for page in written if used[page] > 1} == set(), "a page is written and used in a second place"

    def _markers(self, request, tokens):
        owner = request.cache_salt if self.shares else (request.request_id, request.num_preemptions)
        return [(owner, tuple(tokens[: position + 1])) for position in range(len(tokens))]

    def _read(self, request, count, table):
        """Return the tokens at positions 0..count-1, which must be this request's."""
        tokens = request.token_ids(0, count)
        assert len(tokens) == count, f"{request} has no token at position {count - 1}"
        for position, marker in enumerate(self._markers(request, tokens)):
            page = table[position // self.page_size]
            assert 0 <= page < self.num_pages, f"{request} reads page {page}"
            found = self.slots[page][position % self.page_size]
            assert found == marker, f"{request} finds {found} at position {position}, expected {marker}"
        return tokens


def request(name, prompt=1, output=1, at=0.0, **others):
    """A request of some lengths; all prompts of one length are the same."""
    return Request(name, [1] * prompt, SamplingParams(max_tokens=output), arrival_time=at, **others)


def scheduler_of(policy, *requests, num_pages=64, page_size=4, **limits):
    """A scheduler that checks itself, with requests added and a `runner` of its own."""
    scheduler = CheckedScheduler(policy, num_pages=num_pages, page_size=page_size, **limits)
    scheduler.runner = FakeRunner(num_pages, page_size, limits.get("prefix_cache", False))
    for r in requests:
        scheduler.add(r)
    return scheduler


def serve(scheduler, steps=None, on_token=None, max_steps=1000):
    """Run until nobody is live, or a number of steps; return them."""
    outputs = []
    while scheduler.has_requests and (steps is None or len(outputs) < steps):
        assert len(outputs) < max_steps, f"still live after {max_steps} steps: {list(scheduler.requests.values())}"
        outputs.append(step := scheduler.schedule())
        result = scheduler.runner.execute(step)
        scheduler.update(step, result.tokens, result.errors, on_token)
    return outputs


def table(steps):
    """What each step granted, such as "a4 b1", a star marking padding, and whom it preempted, such as "-c"."""
    granted = [[f"{g.request.request_id}{g.num_tokens}{'*' * g.padding}" for g in s.grants] for s in steps]
    return [
        " ".join([*names, *(f"-{r.request_id}" for r in s.preempted)]) for names, s in zip(granted, steps, strict=True)
    ]


def engine_of(policy=None, *, on_token=None, **limits):
    """An engine whose scheduler checks itself."""
    scheduler = scheduler_of(policy or ChunkedPrefill(), **limits)
    return Engine(scheduler, scheduler.runner, on_token=on_token)


def time_of(*tokens):
    """Seconds that steps of so many tokens take."""
    return sum(STEP_S + TOKEN_S * n for n in tokens)
