"""Chooses who computes what."""
