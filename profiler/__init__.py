"""Measures how fast the machine is."""
