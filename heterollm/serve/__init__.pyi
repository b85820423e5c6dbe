from .options import ServeOptions as ServeOptions
from .run import listen as listen
from .run import serve as serve
