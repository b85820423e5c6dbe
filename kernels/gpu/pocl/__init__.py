"""Code for PoCL alone: its compile target, merged launches, and a guard of its program cache."""
