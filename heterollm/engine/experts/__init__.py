"""Experts of a mixture: those that a memory budget holds, and those that the NPU computes (NPUMoE)."""
