"""Whether the pages fit in the memory of this machine."""

import os

from contbatch.errors import InvalidRequestError


def require_memory(num_pages: int, num_host_pages: int, page_bytes: int) -> None:
    """Raise `InvalidRequestError` if pages of so many bytes, of all layers, are more than the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (num_pages + num_host_pages) * page_bytes > memory:
        asked = f"num_pages {num_pages} + num_host_pages {num_host_pages}"
        raise InvalidRequestError(
            f"{asked} must be at most {memory // page_bytes}: a page takes {page_bytes} bytes, and this machine has "
            f"{memory / 1e9:.1f} GB of memory"
        )
