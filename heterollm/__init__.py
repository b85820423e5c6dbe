"""heterollm: language models on a phone-class GPU and NPU at the same time."""
