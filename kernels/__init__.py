"""What talks to hardware: OpenCL kernels, NPU graphs, devices, and the memory they share."""
