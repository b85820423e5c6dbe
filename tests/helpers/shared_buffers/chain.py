"""A kernel, a graph and a kernel on slots of a pool, several times; prints errors, counts and edges.

Arguments: `probed` to probe first, or `trusted` to believe that all edges work; and seconds for the probe.
"""

import gc
import json
import sys

import numpy as np
from counts import counts

from heterollm.kernels.devices.gpu import open_cpu
from heterollm.kernels.devices.kind import Opening
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import binding_name
from heterollm.kernels.npu import QnnNpu, SharingEdges, exact_product, small_shard
from heterollm.kernels.sync import Pool, SharedArenas
from heterollm.kernels.sync.arena import probe_edges
from heterollm.kernels.threads import split_threads

TOKENS, ROUNDS = 32, 3
COPY = """
kernel void copy_values(global const ushort *from, global ushort *to) {
    to[get_global_id(0)] = from[get_global_id(0)];
}
"""

runtime = open_cpu(split_threads(), Opening())
npu = QnnNpu(emulator=True)
edges = (
    SharingEdges() if sys.argv[1] == "trusted" else probe_edges(runtime, npu, timeout_s=float(sys.argv[2]))
)
arenas = SharedArenas(runtime, npu, edges)
shard = small_shard("chain")
sizes = {"x": TOKENS * shard.columns * 2, "y": TOKENS * shard.rows * 2}
pool = Pool(runtime, sizes, arenas.allocate(sizes))
x, y = pool["x"], pool["y"]
given, result = (runtime.shared((size,), np.uint8) for size in sizes.values())


def copy_of(source, target):
    kernel = runtime.kernel_of_source(COPY, "copy_values")
    return runtime.launch(kernel, (source, target), (source.size_bytes // 2,), (1,), "copy")


first, last = copy_of(given, x), copy_of(y, result)
views = [slot.view(np.float16, (TOKENS, columns)) for slot, columns in ((x, shard.columns), (y, shard.rows))]
graph = npu.prepare(shard, TOKENS).bind({"x": views[0]}, {"y": views[1]})
errors = []
for number in range(ROUNDS):
    values = np.random.default_rng(number).standard_normal((TOKENS, shard.columns)).astype(np.float16)
    given.write(values.view(np.uint8).ravel())
    first()
    runtime.finish()
    x.acquire_to_read()
    y.acquire()
    graph()
    y.release()
    x.release()
    last()
    runtime.finish()
    seen = result.read().view(np.float16).reshape(TOKENS, shard.rows)
    errors.append(linear_errors(seen, exact_product(shard, values)).nmse)
found = {
    "binding": binding_name().partition(",")[0],
    "errors": errors,
    "edges": str(arenas.edges),
    "usable": arenas.edges.usable,
    "counts": counts(),
    "handles": npu.memory.handles if npu.memory else 0,
}
del pool, x, y, views, graph, first, last
npu.close()
gc.collect()
print(json.dumps(found | {"left": counts()}))
