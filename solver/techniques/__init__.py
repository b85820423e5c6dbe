"""Techniques of papers in plans: their records, and the predicted times that they change."""
