"""Continuous batching and paged attention you can read."""
