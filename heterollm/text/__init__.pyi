from .chat import Conversation as Conversation
from .chat import reusable_prefix as reusable_prefix
from .generation import Generation as Generation
from .generation import GenerationOptions as GenerationOptions
from .generation import GenerationResult as GenerationResult
from .generation import GenerationStep as GenerationStep
from .sampling import SamplingOptions as SamplingOptions
from .tokenizer import Tokenizer as Tokenizer
