from .generation import GENERATION_FIELDS as GENERATION_FIELDS
from .gguf import GGUF_FIELDS as GGUF_FIELDS
from .table import Field as Field
from .table import FieldTable as FieldTable
