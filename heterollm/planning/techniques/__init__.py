"""Techniques of papers over a plan: what they are asked for, the plans that have them, and notes on these."""
