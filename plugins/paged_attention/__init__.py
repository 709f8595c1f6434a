"""The PagedAttention operator: contract in README.md, executable spec in reference.py, CPU kernel in cpu.py."""
