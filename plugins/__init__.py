"""Custom operators, importable as `contbatch.plugins`."""
