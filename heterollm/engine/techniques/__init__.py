"""Techniques of papers in the passes of an engine: what they hold, and their steps."""
