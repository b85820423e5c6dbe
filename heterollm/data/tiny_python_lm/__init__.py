"""A 3.7-million-parameter model of Python source, bundled for the demo and the tests."""
