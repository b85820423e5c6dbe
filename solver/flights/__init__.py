"""Several chunks of a prompt at once: their order, and plans with them (llm.npu)."""
