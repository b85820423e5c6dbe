from .gguf import GGUF_FIELDS as GGUF_FIELDS
from .table import FieldTable as FieldTable
