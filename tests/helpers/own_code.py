"""Model types that transformers does not have, with the beginnings of their classes' names."""

OWN_CODE = {"internlm2": "InternLM2", "phonelm": "PhoneLM", "minicpm": "MiniCPM"}
