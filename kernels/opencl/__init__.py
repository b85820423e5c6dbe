"""The OpenCL C sources."""
