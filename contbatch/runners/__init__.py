"""Runners: what turns a scheduled step into tokens."""
