/* Stands in for libcdsprpc.so: shared memory with the functions of Qualcomm's rpcmem.
 *
 * STAND_IN_FAULT: `fd` makes every descriptor -1; `small` makes files of half the size. stand_in_count(0) counts allocations, (1) those that live.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 256
static struct { void *start; size_t size; int descriptor; } held[MOST];
static long allocated, live;

void *rpcmem_alloc2(int heap, uint32_t flags, size_t size) {
    (void)heap, (void)flags;
    int slot = 0;
    while (slot < MOST && held[slot].start) ++slot;
    if (slot == MOST) return NULL;
    size_t whole = (size + 4095) & ~(size_t)4095;
    int descriptor = memfd_create("rpcmem", 0);
    const char *fault = getenv("STAND_IN_FAULT");
    if (descriptor < 0 || ftruncate(descriptor, fault && !strcmp(fault, "small") ? whole / 2 : whole)) return NULL;
    void *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (start == MAP_FAILED) return NULL;
    held[slot].start = start, held[slot].size = whole, held[slot].descriptor = descriptor;
    ++allocated, ++live;
    return start;
}

void *rpcmem_alloc(int heap, uint32_t flags, int size) { return rpcmem_alloc2(heap, flags, size); }

void rpcmem_free(void *start) {
    for (int slot = 0; start && slot < MOST; ++slot)
        if (held[slot].start == start) {
            munmap(start, held[slot].size);
            close(held[slot].descriptor);
            held[slot].start = NULL;
            --live;
        }
}

/* As on Linux, only the first address of an allocation has a descriptor. */
int rpcmem_to_fd(void *start) {
    const char *fault = getenv("STAND_IN_FAULT");
    if (fault && !strcmp(fault, "fd")) return -1;
    for (int slot = 0; slot < MOST; ++slot)
        if (held[slot].start == start) return held[slot].descriptor;
    return -1;
}

void rpcmem_init(void) {}
void rpcmem_deinit(void) {}
void remote_register_buf(void *start, int size, int descriptor) { (void)start, (void)size, (void)descriptor; }
void remote_register_buf_attr2(void *start, size_t size, int descriptor, int attributes) {
    (void)start, (void)size, (void)descriptor, (void)attributes;
}

long stand_in_count(int which) { return which ? live : allocated; }
