from .request import SimulationRequest as SimulationRequest
from .result import PhaseUse as PhaseUse
from .result import SimulationResult as SimulationResult
from .row import ROW_FIELDS as ROW_FIELDS
from .row import SimulatedRow as SimulatedRow
from .run import simulate as simulate
from .sweep import expand as expand
from .sweep import run_sweep as run_sweep
