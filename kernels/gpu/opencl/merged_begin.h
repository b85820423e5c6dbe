// Start of the source of merged launches (kernels/gpu/pocl/merged.py): every following kernel becomes a function of its
// work-group. Local sizes are one, so local memory is private.

#define __kernel static
#define reqd_work_group_size(x, y, z) always_inline
#define get_group_id(d) (task_group[d])
#define get_global_id(d) (task_group[d])
#define get_num_groups(d) (task_groups[d])
#define get_global_size(d) (task_groups[d])
#define get_local_id(d) 0
#define __local
