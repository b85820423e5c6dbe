"""Sparse attention in plans: placements, times, and the choice of them (shadowAttn)."""
