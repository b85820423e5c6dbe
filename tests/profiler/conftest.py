import pytest


@pytest.fixture(scope="module")
def device(host):
    """The ``host`` device, opened once for the tests of a file."""
    return host
