from .base import HeteroLLMError as HeteroLLMError
from .engine import Session as Session
from .kernels.devices import list_devices as list_devices
from .llm import LLM as LLM
from .solver import Plan as Plan
from .text import GenerationResult as GenerationResult
from .text import GenerationStep as GenerationStep

__version__: str
