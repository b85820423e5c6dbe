from .kind import DEVICE_NAMES as DEVICE_NAMES
from .kind import option_devices as option_devices
from .open import list_devices as list_devices
from .open import open_device as open_device
from .open import opens_host as opens_host
from .open import shares_cores as shares_cores
