// Runs the work-groups of several launches in order. Follows the kernels as functions, and run_task, which calls
// them.
//
// A worker waits until all launches before that of the next task are done, and then takes the task, a run of
// work-groups. Tasks are taken in order, and a waiting worker holds no task, so any number of running workers makes
// progress. A worker that waits long leaves: the system has probably preempted another worker, and resumes it sooner
// on an idle core.

#undef __kernel
#undef reqd_work_group_size
#undef get_group_id
#undef get_global_id
#undef get_num_groups
#undef get_global_size
#undef get_local_id
#undef __local

#if defined(__clang__) && defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX
#endif

// Entry of a launch: kind, first task, task behind the last, work-groups per task, work-groups in each of three
// dimensions, and its arguments from ENTRY_ARGUMENTS on.
#define ENTRY_WORDS 40
#define ENTRY_ARGUMENTS 8

// Turns to wait: some 100 us.
#define PATIENCE 6000

// Counters, each in its own cache line.
#define TAKEN 0
#define DONE 32
#define LEFT 64

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void merged(__global const ulong *entries, int count,
                                                                    __global volatile int *counters) {
  __global const ulong *entry = entries;
  __global const ulong *end = entries + (size_t)count * ENTRY_WORDS;
  int patience = PATIENCE;
  while (patience > 0) {
    const int task = counters[TAKEN];
    while (entry != end && task >= (int)entry[2]) entry += ENTRY_WORDS;
    if (entry == end) break;
    if (counters[DONE] < (int)entry[1]) {
      patience--;
      RELAX;
      continue;
    }
    // This is also a memory barrier: reads of earlier launches' results stay behind it.
    if (atomic_cmpxchg(counters + TAKEN, task, task + 1) != task) continue;
    patience = PATIENCE;
    const uint groups[3] = {(uint)entry[4], (uint)entry[5], (uint)entry[6]};
    const uint all = groups[0] * groups[1] * groups[2];
    const uint first = (uint)(task - (int)entry[1]) * (uint)entry[3];
    for (uint index = first; index < min(all, first + (uint)entry[3]); index++) {
      const uint group[3] = {index % groups[0], index / groups[0] % groups[1], index / (groups[0] * groups[1])};
      run_task((int)entry[0], group, groups, entry + ENTRY_ARGUMENTS);
    }
    atomic_inc(counters + DONE);
  }
  // The last worker resets the counters for the next launch.
  if (atomic_inc(counters + LEFT) == (int)get_num_groups(0) - 1) {
    counters[TAKEN] = 0;
    counters[DONE] = 0;
    counters[LEFT] = 0;
  }
}
