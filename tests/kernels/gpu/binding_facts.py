"""Prints everything that a process sees of OpenCL through its binding; run as a script by test_binding.py."""

import gc
import json

import numpy as np

from heterollm.kernels.formats import random_weight
from heterollm.kernels.gpu import GpuLinear, OpenClRuntime, is_cpu, list_opencl_devices
from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.signals import is_complete, kernel_times_ns
from heterollm.kernels.ops import WeightFormat

SOURCE = """
kernel void fill(
    global int *out, const int first, const float step, local int *shared, global const int *none
) {
    shared[get_local_id(0)] = first + (int)(step * get_global_id(0));
    barrier(CLK_LOCAL_MEM_FENCE);
    out[get_global_id(0)] = shared[get_local_size(0) - 1 - get_local_id(0)] + (none == 0);
}
kernel void texels(read_only image1d_buffer_t words, global uint *out) {
    out[get_global_id(0)] = read_imageui(words, get_global_id(0)).x;
}
"""
TEXTS = ("name", "vendor", "driver_version", "version", "extensions", "opencl_c_version")
NUMBERS = (
    *("type", "max_compute_units", "max_work_group_size", "max_mem_alloc_size", "image_support"),
    *("global_mem_cache_size", "global_mem_size", "local_mem_size", "host_unified_memory"),
    *("image_max_buffer_size", "svm_capabilities"),
)


def refused(call):
    """Return the status and the first words of the error of a call."""
    try:
        call()
    except OpenClError as error:
        return error.code, str(error).partition("\n")[0].split(" ")[1:3]
    raise AssertionError("no error")


def facts(device):
    yield [getattr(device, name) for name in TEXTS]
    yield [int(getattr(device, name)) for name in NUMBERS]
    yield [device.platform.name, device.platform.version]
    runtime = OpenClRuntime(device, profiling=True)
    queue, context = runtime.queue, runtime.context
    program = cl.Program(context, SOURCE).build(options=["-cl-kernel-arg-info"], cache_dir=False)
    kernel = cl.Kernel(program, "fill")
    yield [kernel.function_name, kernel.num_args]
    info = cl.kernel_arg_info
    yield [
        [int(kernel.get_arg_info(index, name)) for name in (info.ADDRESS_QUALIFIER, info.TYPE_QUALIFIER)]
        for index in range(kernel.num_args)
    ]
    size = 64
    out = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * size)
    kernel.set_args(out, np.int32(7), np.float32(1.5), cl.LocalMemory(4 * 8), None)
    event = cl.enqueue_nd_range_kernel(queue, kernel, (size,), (8,))
    event.wait()
    times = kernel_times_ns(event)
    yield [is_complete(event), 0 < times.queued <= times.start <= times.end]
    found = np.zeros(size, np.int32)
    cl.enqueue_copy(queue, found, out)
    yield found.tolist()
    # Ranges: a write, a fill, a copy between buffers, a map.
    other = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * size)
    cl.enqueue_copy(queue, other, np.arange(8, dtype=np.int32), dst_offset=16)
    cl.enqueue_fill_buffer(queue, other, np.uint8(3), 48, 8)
    cl.enqueue_copy(queue, out, other, byte_count=40, src_offset=16, dst_offset=8)
    view, _ = cl.enqueue_map_buffer(queue, out, cl.map_flags.READ | cl.map_flags.WRITE, 8, (48,), np.uint8)
    yield view.tolist()
    view[:4] = 9
    unmapped = view.base.release(queue)
    view, _ = cl.enqueue_map_buffer(queue, out, cl.map_flags.READ, 0, (16,), np.uint8, wait_for=[unmapped])
    yield view.tolist()
    view.base.release(queue)
    marker = cl.enqueue_marker(queue)
    queue.finish()
    yield is_complete(marker)
    words = np.arange(32, dtype=np.uint32) * 3
    held = runtime.upload(words)
    image = runtime.word_image(held)
    texels, read = cl.Kernel(program, "texels"), runtime.shared((32,), np.uint32)
    runtime.launch(texels, (image, read), (32,), (1,), "texels")()
    runtime.finish()
    yield read.array.tolist()
    binary = program.get_info(cl.program_info.BINARIES)[0]
    again = cl.Kernel(cl.Program(context, [device], [binary]).build(cache_dir=False), "fill")
    again.set_args(out, np.int32(1), np.float32(0), cl.LocalMemory(32), None)
    cl.enqueue_nd_range_kernel(queue, again, (size,), (8,))
    cl.enqueue_copy(queue, found, out)
    yield found.tolist()
    # Errors: the same statuses.
    yield refused(lambda: cl.Program(context, "kernel void f( {").build(cache_dir=False))
    yield refused(lambda: cl.Kernel(program, "nothing"))
    yield refused(lambda: cl.enqueue_nd_range_kernel(queue, kernel, (size,), (7,)))
    yield refused(lambda: cl.Buffer(context, cl.mem_flags.READ_WRITE, 0))
    yield refused(lambda: event_without_times(context, device))
    for arguments in ((), (out, 7, np.float32(0), cl.LocalMemory(4), None)):
        try:
            kernel.set_args(*arguments)
            yield "no error"
        except (TypeError, OpenClError):
            yield "refused"
    yield from linears(device)


def event_without_times(context, device):
    queue = cl.CommandQueue(context, device)
    event = cl.enqueue_marker(queue)
    queue.finish()
    return event.profile.start


def linears(device):
    """Bits of a linear layer in each kind of memory, which is released between."""
    for kind in ("host", "mapped", "svm"):
        runtime = OpenClRuntime(device, shared_memory=kind)
        weight = random_weight(np.random.default_rng(0), 96, 128, WeightFormat(4, 32))
        layer = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
        x, y = runtime.shared((5, 128), np.float32), runtime.shared((5, 96), np.float32)
        x.acquire()
        x.array[...] = np.random.default_rng(1).standard_normal((5, 128))
        x.release()
        layer.launch(x, y, tokens=5, label="linear")()
        runtime.finish()
        y.acquire_to_read()
        yield y.array.view(np.uint32).tolist()
        y.release()
        del runtime, layer, x, y
        gc.collect()


if __name__ == "__main__":
    cpu = next(device for _, device in list_opencl_devices() if is_cpu(device))
    print(json.dumps(list(facts(cpu))))
