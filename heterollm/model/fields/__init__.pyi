from .gguf import GGUF_FIELDS as GGUF_FIELDS
