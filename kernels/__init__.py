"""The layer above the hardware: OpenCL kernels, NPU graphs, devices, and the memory they share."""
