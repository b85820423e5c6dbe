"""Sparse attention: its slots, and its steps (shadowAttn)."""
