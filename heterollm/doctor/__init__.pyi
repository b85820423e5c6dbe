from .case import Check as Check
from .run import Diagnosis as Diagnosis
from .run import diagnose as diagnose
