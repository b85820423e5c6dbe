"""A second queue for maps, if the driver maps memory while a kernel of the first queue reads it."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np

from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.memory import aligned_zeros

logger = logging.getLogger(__name__)

READER: Final = """
kernel void read_for_long(global const uint *memory, global uint *sum, const uint count) {
    uint value = memory[0];
    for (uint i = 0; i < count; ++i) value = value * 1664525u + memory[value & 255u];
    *sum = value;
}
"""
FIRST_COUNT: Final = 1 << 12
LONGEST_COUNT: Final = 1 << 18
"""Dependent reads of a kernel of one work-item, of 0.1 to 1 us each."""


def queue_for_maps(
    context: cl.Context, device: cl.Device, queue: cl.CommandQueue, kernel: cl.Kernel
) -> cl.CommandQueue | None:
    """Return a queue whose maps overlap with kernels of another one; None where the driver waits for these.

    OpenCL lets kernels read memory that is mapped for reading. A driver may still wait until no kernel uses a
    buffer; then a split would run the NPU's shard after the GPU's. So a kernel reads a buffer while the host
    maps it, longer and longer until it is still running after the map.

    Args:
        context: The context of both queues.
        device: The device.
        queue: The queue of the kernels.
        kernel: The kernel of :data:`READER`.
    """
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
    try:
        second = cl.CommandQueue(context, device)
        read, written = (cl.Buffer(context, flags, hostbuf=aligned_zeros((1024,), np.uint32)) for _ in "rw")
        count = FIRST_COUNT
        while count <= LONGEST_COUNT:
            kernel.set_args(read, written, np.uint32(count))
            reading = cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,))
            queue.flush()
            view, _ = cl.enqueue_map_buffer(second, read, cl.map_flags.READ, 0, (4096,), np.uint8)
            mapped: Any = view.base
            running = reading.command_execution_status != cl.command_execution_status.COMPLETE
            mapped.release(queue)
            queue.finish()
            if running:
                return second
            count *= 8
    except OpenClError as error:
        logger.info("Maps stay in the queue of the kernels: %s", error)
    return None
