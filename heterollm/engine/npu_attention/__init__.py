"""Attention on the NPU in prefill: its slots, and its steps."""
