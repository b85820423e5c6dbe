from .fleet import ListedModel as ListedModel
from .options import ServeOptions as ServeOptions
from .run import listen as listen
from .run import serve as serve
from .run import serve_several as serve_several
from .run import session_places as session_places
