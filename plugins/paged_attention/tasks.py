"""Deals out the attention of one step to threads."""

import numpy as np

from contbatch.plugins.paged_attention.tile import SPAN, TILE

ROWS_PER_TASK = 128
"""Query rows (tokens × heads of a group) that share a tile of keys: enough to hide the cost of gathering it."""
SHARES = 4
"""A task that costs more than a thread's part of the work by so many is split into spans of its keys."""


def make_tasks(
    start: np.ndarray, past: np.ndarray, group: int, kv_num_heads: int, window: int, num_threads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return `StepPlan.tasks`, `StepPlan.splits`, and the cost of all tasks.

    Cost is counted in tiles of keys × (query rows + 4, for gathering the tile).
    """
    most_tokens = max(1, ROWS_PER_TASK // group)
    new = np.diff(start)
    num_blocks = -(-new // most_tokens)
    sequence = np.repeat(np.arange(new.size), num_blocks)
    offset = (np.arange(sequence.size) - (np.cumsum(num_blocks) - num_blocks)[sequence]) * most_tokens
    num_tokens = np.minimum(most_tokens, new[sequence] - offset)
    position = past[sequence] + offset
    first, end = np.maximum(position - window + 1, 0), position + num_tokens
    by_head = np.empty((sequence.size, kv_num_heads, 9), np.int64)
    head = np.arange(kv_num_heads)
    columns = sequence, head, head + 1, start[sequence] + offset, num_tokens, position, first, end, -1
    for column, values in enumerate(columns):
        by_head[..., column] = values if column in (1, 2, 8) else values[:, None]
    tasks = by_head.reshape(-1, 9)
    cost = _cost(tasks, group)
    total = int(cost.sum())
    tasks, splits = _split(tasks, group, cost > total / (SHARES * num_threads))
    decodes = (tasks[:, 4] == 1) & (tasks[:, 8] < 0)
    if decodes.sum() >= SHARES * num_threads * kv_num_heads:  # one thread reads a page from its beginning to its end
        tasks[decodes, 2] = kv_num_heads
        tasks = tasks[~decodes | (tasks[:, 1] == 0)]
    return tasks[np.argsort(-_cost(tasks, group), kind="stable")], splits, total


def _cost(tasks: np.ndarray, group: int) -> np.ndarray:
    tiles = (tasks[:, 7] - 1) // TILE - tasks[:, 6] // TILE + 1
    cost: np.ndarray = (tasks[:, 2] - tasks[:, 1]) * tiles * (tasks[:, 4] * group + 4)
    return cost


def _split(tasks: np.ndarray, group: int, dear: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tasks of which the dear ones are split into their spans, and `StepPlan.splits`."""
    num_spans = (tasks[:, 7] - 1) // SPAN - tasks[:, 6] // SPAN + 1
    chosen = dear & (num_spans > 1)
    if not chosen.any():
        return tasks, np.empty((0, 5), np.int64)
    pieces, splits, part = [tasks[~chosen]], [], 0
    for task, spans in zip(tasks[chosen], num_spans[chosen], strict=True):
        rows = task[4] * group
        piece = np.repeat(task[None], spans, axis=0)
        edges = (task[6] // SPAN + np.arange(1, spans)) * SPAN
        piece[1:, 6], piece[:-1, 7] = edges, edges
        piece[:, 8] = part + np.arange(spans) * rows
        pieces.append(piece)
        splits.append((task[1], task[3], rows, part, spans))
        part += spans * rows
    return np.concatenate(pieces), np.array(splits, np.int64)
