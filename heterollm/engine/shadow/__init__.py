"""Shadow outliers: their slots, their weights, and the steps around graphs of integers (llm.npu)."""
