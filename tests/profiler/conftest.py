import pytest

from heterollm.base import DeviceError
from heterollm.kernels.open import open_device


@pytest.fixture(scope="module")
def device():
    """The ``host`` device, opened once for the tests of a file."""
    try:
        opened = open_device("host")
    except DeviceError as error:
        pytest.skip(f"needs the host device: {error}")
    yield opened
    opened.close()
