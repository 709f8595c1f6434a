"""PagedAttention: the contract (README.md), the executable spec and the kernels."""
