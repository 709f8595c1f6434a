"""Drives a paged model step by step over ragged batches, with pages handed out in an order that makes no sense."""

from collections import Counter

import numpy as np


def step(*rows, table, logits=None):
    """The arrays of one step; each row is (new token ids, how many tokens are in pages already)."""
    ends = np.cumsum([0] + [len(ids) for ids, _ in rows])
    return {
        "input_ids": np.concatenate([np.asarray(ids, np.int64) for ids, _ in rows]),
        "cumulative_sequence_length": ends.astype(np.int32),
        "past_seqlens": np.array([past for _, past in rows], np.int32),
        "block_table": np.asarray(table, np.int32),
        "logits_indices": np.arange(ends[-1]) if logits is None else np.asarray(logits, np.int64),
    }


def prompts_for(steps, vocab_size, seed=1):
    """Random token ids for each sequence named in `steps`, as many as they compute."""
    lengths = Counter()
    for grants in steps:
        lengths.update(dict(grants))
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, lengths[s]) for s in range(len(lengths))]


class Driver:
    """Hands out pages of a model and remembers what each sequence has in them."""

    def __init__(self, model, sequences, seed=0):
        self.model, self.sequences = model, sequences
        self.free = np.random.default_rng(seed).permutation(model.num_pages).tolist()
        self.pages, self.done = [[] for _ in sequences], [0] * len(sequences)
        self.logits = [[] for _ in sequences]

    def arrays(self, grants):
        """The step that computes n more tokens of each sequence s, for (s, n) in `grants`."""
        for s, n in grants:
            while len(self.pages[s]) * self.model.page_size < self.done[s] + n:
                self.pages[s].append(self.free.pop())
        width = max(len(self.pages[s]) for s, _ in grants)
        table = [self.pages[s] + [-1] * (width - len(self.pages[s])) for s, _ in grants]
        rows = [(self.sequences[s][self.done[s] : self.done[s] + n], self.done[s]) for s, n in grants]
        return step(*rows, table=table)

    def run(self, grants):
        out = self.model.forward(self.arrays(grants)).copy()
        for (s, n), rows in zip(grants, np.split(out, np.cumsum([n for _, n in grants])[:-1]), strict=True):
            self.logits[s].append(rows)
            self.done[s] += n


def run_steps(model, sequences, steps, seed=0):
    """Logits of every token, by sequence."""
    driver = Driver(model, sequences, seed)
    for grants in steps:
        driver.run(grants)
    return [np.concatenate(rows) for rows in driver.logits]
