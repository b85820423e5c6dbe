// Kernels of fences, of their litmus test and of injected delays (fence.py, litmus.py and faults.py in kernels/sync).
// Valid for OpenCL C 1.2. The flag has a second form for shared virtual memory with atomics, the only one that OpenCL
// guarantees to be visible to a host that does not wait for the queue.

// Increments the flag behind all earlier writes of the queue.
#ifdef SVM_ATOMICS
__kernel void raise_flag(__global uint *flag) {
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_release, memory_scope_all_svm_devices);
  atomic_fetch_add_explicit((volatile __global atomic_uint *)flag, 1u, memory_order_release,
                            memory_scope_all_svm_devices);
}
#else
__kernel void raise_flag(__global volatile uint *flag) {
  mem_fence(CLK_GLOBAL_MEM_FENCE);
  atomic_inc(flag);
}
#endif

// Writes the number of this round into data, one element per work-item; count_round ends the round.
__kernel void write_round(__global uint *data, __global const uint *rounds) {
  data[get_global_id(0)] = rounds[0] + 1u;
}

__kernel void count_round(__global uint *rounds) { rounds[0] += 1u; }

// One work-item computes for a number of turns and then writes the number of this run into all of data.
__kernel void late_write(__global uint *data, int count, __global uint *rounds, int turns) {
  const uint before = rounds[0];
  float value = (float)before;
  for (int turn = 0; turn < turns; turn++) value = value * 0.9990234375f + 1.0f;
  // The value is never negative, but the compiler cannot know that and keeps the loop.
  const uint number = before + (value >= 0.0f ? 1u : 0u);
  for (int index = 0; index < count; index++) data[index] = number;
  rounds[0] = number;
}

// Runs until the host opens the gate, at most for a number of turns.
__kernel void stand_at_gate(__global volatile uint *gate, int turns) {
  for (int turn = 0; turn < turns && gate[0] == 0u; turn++) {
  }
}
