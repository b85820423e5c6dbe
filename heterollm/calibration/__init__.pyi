from .decision import Policy as Policy
from .records import Calibration as Calibration
from .records import load_calibration as load_calibration
from .routing import RoutingCalibration as RoutingCalibration
from .run import calibrate as calibrate
