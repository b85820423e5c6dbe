// First in the source of merged launches (kernels/gpu/pocl/merged.py), before the kernels' own files: every kernel becomes
// a function of the work-group that it computes. Local sizes are one: a group's memory is private.

#define __kernel static
#define reqd_work_group_size(x, y, z) always_inline
#define get_group_id(d) (task_group[d])
#define get_global_id(d) (task_group[d])
#define get_num_groups(d) (task_groups[d])
#define get_global_size(d) (task_groups[d])
#define get_local_id(d) 0
#define __local
