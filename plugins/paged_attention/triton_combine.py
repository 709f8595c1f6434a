"""Joins what the programs of a split sequence have seen: the second launch of the split form of `triton_kernel`."""
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def combine(partial, lse, num_rows, output, head_size: tl.constexpr, num_splits: tl.constexpr):
    """Join the partial outputs of one token and head: their mean, weighted by what each one saw. Grid: (num_rows,).

    partial is float32 (num_splits, num_rows, head_size), lse float32 (num_splits, num_rows), output of any type
    (num_rows, head_size); rows are tokens × heads.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, triton.next_power_of_2(head_size))
    highest = -float("inf")
    for split in range(num_splits):
        highest = tl.maximum(highest, tl.load(lse + split * num_rows.to(tl.int64) + row))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    acc = tl.zeros([triton.next_power_of_2(head_size)], tl.float32)
    total = 0.0
    for split in range(num_splits):
        at = split * num_rows.to(tl.int64) + row
        weight = tl.exp2(tl.load(lse + at) - base)
        part = tl.load(partial + at * head_size + d, mask=d < head_size, other=0.0)
        acc += weight * part
        total += weight
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * head_size + d, acc.to(output.dtype.element_ty), mask=d < head_size)
