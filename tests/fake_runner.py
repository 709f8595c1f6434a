"""A runner whose pages hold markers in place of keys and values, so that a wrong page is seen, not guessed."""

from collections import Counter, defaultdict

from invariants import CheckedScheduler

from contbatch.engine import Engine, StepResult
from contbatch.inputs import pack
from contbatch.policies import ChunkedPrefill
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams

VOCABULARY = 7
STEP_S, TOKEN_S = 1.0, 0.125


def next_token(tokens, sample=0):
    """Return the token after `tokens`: any change of any of them, or of the sample's index, may change it."""
    return hash((*tokens, -sample) if sample else tuple(tokens)) % VOCABULARY


def solo(request):
    """Return output tokens and finish reason of a request that has the model to itself."""
    tokens, output = list(request.prompt_token_ids), []
    while len(output) < request.sampling.max_tokens:
        output.append(next_token(tokens + output, request.sample_index))
        if output[-1] in request.stop_ids:
            return output, "stop"
    return output, "length"


class FakeRunner:
    """Computes `next_token` from what it finds in its pages.

    A slot holds (stamp, tokens up to and with its own). Without a prefix cache the stamp is the number of the write. A
    request must find those of its own since it was last computed anew, or those of the kin it was forked from: content
    left over from before is as wrong as another request's. With a cache the stamp is the salt: a page of others will
    do if all tokens before and in it are equal.

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

    def __init__(self, num_pages, page_size, shares=False, num_host_pages=0, *, crash=(), poison=()):
        self.num_pages, self.page_size, self.shares = num_pages, page_size, shares
        self.slots = [[None] * page_size for _ in range(num_pages)]
        self.host = [[None] * page_size for _ in range(num_host_pages)]
        self.num_writes, self.written = 0, defaultdict(list)
        self.crash, self.poison = set(crash), dict(poison)
        self.calls = 0
        self.steps = []
        """(grants as plain tuples, elapsed_s) of every step computed."""
        self.moves = []
        """The page moves of every step computed."""

    def validate(self, request):
        request.token_ids(0, 1)

    def execute(self, step):
        inputs = pack(step)
        ends, batch = inputs.cumulative_sequence_length.tolist(), inputs.input_ids.tolist()
        rows = list(zip(step.grants, inputs.past_seqlens.tolist(), inputs.block_table.tolist(), strict=True))
        assert ends[0] == 0
        assert ends[-1] == len(batch) == step.num_tokens
        self.calls += 1
        self._move(step.moves)
        for (request, *_), past, table in rows:
            self._read(request, past, table)
        self._require_sole_writers(ends, rows)
        for row, ((request, *_), past, table) in enumerate(rows):
            if self.calls - 1 in self.crash and row == len(rows) // 2:
                raise RuntimeError(f"call {self.calls - 1} crashed")
            new = batch[ends[row] : ends[row + 1]]
            tokens = [*self._read(request, past, table), *new]
            del self.written[self._key(request)][past:]
            for position in range(past, len(tokens)):
                page = table[position // self.page_size]
                assert 0 <= page < self.num_pages, f"{request} writes to page {page}"
                self.num_writes += 1
                stamp = request.cache_salt if self.shares else self.num_writes
                self.slots[page][position % self.page_size] = marker = stamp, tuple(tokens[: position + 1])
                self.written[self._key(request)].append(marker)
        tokens, errors = {}, {}
        sampled = list(zip(inputs.sampled, inputs.logits_indices.tolist(), strict=True))
        for row, ((request, *_), past, table) in enumerate(rows):
            known = self._read(request, past + ends[row + 1] - ends[row], table)
            for one in [r for r, last in sampled if last == ends[row + 1] - 1]:
                assert one.token_ids(0, one.num_tokens) == known, f"{one} samples after other tokens than its own"
                if self.poison.get(one.request_id) == one.num_output_tokens:
                    errors[one.request_id] = ValueError(f"{one.request_id} is poisoned")
                else:
                    tokens[one.request_id] = next_token(known, one.sample_index)
        assert len(sampled) == len(tokens) + len(errors), "sampled from another row than the last of its own"
        elapsed_s = STEP_S + TOKEN_S * len(batch)
        self.moves.append(step.moves)
        self.steps.append(([(r.request_id, *rest) for r, *rest in step.grants], elapsed_s))
        return StepResult(tokens, elapsed_s, errors)

    def _move(self, moves):
        half = len(moves) // 2 if self.calls - 1 in self.crash and len(moves) % 2 else None
        sides = {"copy": (self.slots, self.slots), "out": (self.slots, self.host), "in": (self.host, self.slots)}
        for number, (kind, source, target) in enumerate(moves):
            if number == half:
                raise RuntimeError(f"call {self.calls - 1} crashed")
            of, to = sides[kind]
            to[target] = of[source].copy()

    def _require_sole_writers(self, ends, rows):
        """A page written in this step is used once, as the operator's contract demands."""
        used, written = Counter(), set()
        for row, (_, past, table) in enumerate(rows):
            stop = past + ends[row + 1] - ends[row]
            used.update(table[: -(-stop // self.page_size)])
            written.update(table[past // self.page_size : -(-stop // self.page_size)])
        assert {page for page in written if used[page] > 1} == set(), "a page is written and used in a second place"

    def _key(self, request):
        return request.request_id, request.num_preemptions - request.num_swaps

    def _expected(self, request, tokens, found):
        if self.shares:
            return [(request.cache_salt, tuple(tokens[: position + 1])) for position in range(len(tokens))]
        own = self.written[self._key(request)]
        if len(own) < len(found):  # just forked
            kin = {*(request.parent or request).samples} - {request}
            sources = [self.written[self._key(r)] for r in kin]
            assert any(found == source[: len(found)] for source in sources), f"{request} finds {found}"
            assert len(found) == request.num_computed_tokens <= request.num_forked_tokens
            own[:] = found
        return own[: len(found)]

    def _read(self, request, count, table):
        """Return the tokens at positions 0..count-1, which must be this request's."""
        tokens = request.token_ids(0, count)
        assert len(tokens) == count, f"{request} has no token at position {count - 1}"
        found = []
        for position in range(count):
            page = table[position // self.page_size]
            assert 0 <= page < self.num_pages, f"{request} reads page {page}"
            found.append(self.slots[page][position % self.page_size])
        for position, (slot, marker) in enumerate(zip(found, self._expected(request, tokens, found), strict=True)):
            assert slot == marker, f"{request} finds {slot} at position {position}, expected {marker}"
            assert slot[1] == tuple(tokens[: position + 1])
        return tokens


def request(name, prompt=1, output=1, at=0.0, **others):
    """A request of some lengths; all prompts of one length are the same."""
    return Request(name, [1] * prompt, SamplingParams(max_tokens=output), arrival_time=at, **others)


def scheduler_of(policy, *requests, num_pages=64, page_size=4, **limits):
    """A scheduler that checks itself, with requests added and a `runner` of its own."""
    scheduler = CheckedScheduler(policy, num_pages=num_pages, page_size=page_size, **limits)
    prefix_cache, num_host_pages = limits.get("prefix_cache", False), limits.get("num_host_pages", 0)
    scheduler.runner = FakeRunner(num_pages, page_size, prefix_cache, num_host_pages)
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
