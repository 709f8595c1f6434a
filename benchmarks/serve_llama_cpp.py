"""llama.cpp; see cpu.py. Arguments: MODEL.gguf PRECISION WORKLOAD.

Runs in a virtual environment of its own: pip install llama-cpp-python, which compiles it for this processor. Its
decoding calls, in a loop like that of its server: each step takes a token of every seat that decodes, then as many of
the prompts that wait as fit. Precision "file" has the weights as they are in the file; others are made of it.
"""

import os
import sys
from ctypes import byref
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from tempfile import TemporaryDirectory

import llama_cpp as cpp
import numpy as np
from workload import WORKLOADS, Figures, serve, timed

SEATS = {"common": 16, "equal": 64}
UNIFIED = ("common",)
"""Where all sequences share one cache: else only those on neighbouring seats are computed together."""
FILE_TYPES = {"f32": cpp.LLAMA_FTYPE_ALL_F32, "bf16": cpp.LLAMA_FTYPE_MOSTLY_BF16}


@dataclass
class Sequence:
    """A request: its tokens so far, how many of them are computed, and how many there will be."""

    tokens: list[int]
    end: int
    computed: int = 0
    seat: int = -1


@dataclass
class Server:
    """Seats, and who waits for one."""

    context: object
    vocab_size: int
    budget: int
    free: list[int]
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = cpp.llama_batch_init(self.budget, 0, 1)

    def step(self) -> bool:
        while self.free and self.waiting:
            self.running.append(self.waiting.pop(0))
            self.running[-1].seat = heappop(self.free)
        self.batch.n_tokens = 0
        rows = []
        for sequence in sorted(self.running, key=lambda s: (len(s.tokens) - s.computed > 1, s.seat)):
            for place in range(sequence.computed, len(sequence.tokens)):
                if self.batch.n_tokens == self.budget:
                    break
                self._put(sequence, place)
            if sequence.computed == len(sequence.tokens):
                rows.append((sequence, self.batch.n_tokens - 1))
        if not self.batch.n_tokens:
            return False
        if status := cpp.llama_decode(self.context, self.batch):
            raise SystemExit(f"llama_decode: {status}")
        for sequence, row in rows:
            logits = np.ctypeslib.as_array(cpp.llama_get_logits_ith(self.context, row), (self.vocab_size,))
            sequence.tokens.append(int(logits.argmax()))
            if len(sequence.tokens) == sequence.end:
                self._leave(sequence)
        return True

    def _put(self, sequence: Sequence, place: int) -> None:
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row] = sequence.tokens[place], place
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence.seat
        batch.logits[row] = place + 1 == len(sequence.tokens)
        batch.n_tokens, sequence.computed = row + 1, place + 1

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        heappush(self.free, sequence.seat)
        cpp.llama_memory_seq_rm(cpp.llama_get_memory(self.context), sequence.seat, -1, -1)


def load(path: str, precision: str) -> object:
    with TemporaryDirectory() as folder:
        if precision in FILE_TYPES:
            options = cpp.llama_model_quantize_default_params()
            options.ftype, options.allow_requantize = FILE_TYPES[precision], True
            path, source = str(Path(folder) / "model.gguf"), path
            if cpp.llama_model_quantize(source.encode(), path.encode(), byref(options)):
                raise SystemExit(f"llama.cpp can't make {precision} of {source}")
        options = cpp.llama_model_default_params()
        options.use_extra_bufts = False  # its AMX kernel for Q4_1 ends in a segmentation fault
        return cpp.llama_model_load_from_file(path.encode(), options)


def main() -> None:
    path, precision, workload = sys.argv[1:]
    prompts, lengths, budget = WORKLOADS[workload]()
    quiet = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(quiet, None)
    cpp.llama_backend_init()
    model = load(path, precision)
    seats, longest = SEATS[workload], max(len(p) + n for p, n in zip(prompts, lengths, strict=True))
    options = cpp.llama_context_default_params()
    options.n_seq_max, options.n_ctx = seats, seats * -(-longest // 256) * 256
    options.n_batch, options.n_ubatch, options.kv_unified = budget, 512, workload in UNIFIED
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    context = cpp.llama_init_from_model(model, options)
    vocab_size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    server = Server(context, vocab_size, budget, list(range(seats)))

    def run() -> Figures:
        sequences = [Sequence(list(p), len(p) + n) for p, n in zip(prompts, lengths, strict=True)]
        figures = timed(lambda: server.waiting.extend(sequences), server.step)
        return figures | {"tokens": sum(len(s.tokens) - len(p) for s, p in zip(sequences, prompts, strict=True))}

    serve(run)


if __name__ == "__main__":
    main()
