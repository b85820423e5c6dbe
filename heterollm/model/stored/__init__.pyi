from .affine_blocks import STORED_VERSION as STORED_VERSION
from .affine_blocks import canonical as canonical
from .gguf_file import is_gguf as is_gguf
from .gguf_folder import gguf_folder as gguf_folder
from .gguf_folder import open_gguf as open_gguf
from .packed_linears import PackedLinears as PackedLinears
from .packed_linears import PackedTensor as PackedTensor
from .stored_tensors import StoredTensors as StoredTensors
