"""Test problems on the GPU kernel in Triton's interpreter."""

import ml_dtypes
import numpy as np

from contbatch.plugins.paged_attention.interpreter import combine_here, launch, launch_here, submit
from contbatch.plugins.paged_attention.variant import Tactic, Variant

DTYPES = {np.float16: "float16", ml_dtypes.bfloat16: "bfloat16"}
__all__ = ["SMALL", "combine_here", "launch", "launch_here", "run", "submit"]
SMALL = Tactic(block_rows=16, block_keys=16, num_warps=1, num_stages=1)


def run(problem, tactic=SMALL, packed=True, num_splits=1):
    """Run a `paged_problem.Problem`, activations and rotary tables in the dtype of its pages.

    Rounds the tables of the problem to that dtype. Returns output and both caches.
    """
    variant = Variant(
        DTYPES[problem.pages], problem.heads, problem.kv_heads, problem.head_size, problem.page_size, tactic,
        rotary_dim=problem.rotary_dim, packed=packed, num_splits=num_splits, **problem.attributes,
    )  # fmt: skip
    steps = problem.steps()
    problem.cos, problem.sin = tables = [table.astype(problem.pages) for table in (problem.cos, problem.sin)]
    tables = tables if problem.rotary_dim else [None, None]
    qkv, columns = problem.qkv.astype(problem.pages), problem.heads * problem.head_size
    split = [columns, columns + problem.kv_heads * problem.head_size]
    inputs = [qkv, None, None] if packed else [np.ascontiguousarray(x) for x in np.split(qkv, split, axis=1)]
    return launch(variant, [*inputs, *problem.caches, *steps[:3], *tables])
