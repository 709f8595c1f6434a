"""What the requests of a step read together."""

from collections.abc import Iterable

from contbatch.pages import PagePool
from contbatch.step import Grant


def find_shared_context(grants: Iterable[Grant], pool: PagePool) -> int:
    """Count the positions that grants of one token read in pages which another grant reads as well.

    A page is counted for each of its readers but one; and for all of them if a grant of several tokens reads it. They
    find it in the cache of the processor, where it was just brought.
    """
    if not pool.num_shared:
        return 0
    read, again = set[int](), 0
    for request, _, num_tokens, _, _ in sorted(grants, key=lambda grant: grant.num_tokens == 1):
        shared, before = pool.shared_first(request.pages), len(read)
        read.update(shared)
        if num_tokens == 1:
            again += len(shared) - (len(read) - before)
    return again * pool.page_size
