"""Experts on the NPU in plans: placements, prices, and the search for them (NPUMoE)."""
