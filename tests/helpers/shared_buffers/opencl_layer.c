/* An OpenCL layer that offers Qualcomm's external host pointers on a CPU: it checks what a driver checks, and
 * uses the host's pages in place.
 *
 * LAYER_TYPES names what it takes, of `dmabuf`, `ion` (default: both) and `khr`, Khronos' import of dma-bufs.
 * LAYER_FAULT: `aligned` wants addresses at multiples of 1 GiB; `policy` knows no policy of cached memory;
 * `stale` gives kernels a copy that only an unmap refreshes, and never shows what they write; `maps` gives
 * them one that maps and unmaps carry over.
 * layer_count(0) counts imports, (1) refused ones.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { DEVICE_INFO = 3, CREATE_BUFFER = 14, MAP = 56, UNMAP = 58, LOOK_UP = 107, CREATE_WITH_PROPERTIES = 146, TABLE = 512 };
enum { USE_HOST_PTR = 1 << 3, EXT_HOST_PTR = 1 << 29, INVALID_VALUE = -30 };
static void *below[TABLE], *own[TABLE];
static long counts[2];
static char *pages, *copy;
static size_t pages_bytes;

static int asked(const char *variable, const char *name, int otherwise) {
    const char *text = getenv(variable);
    return text ? strstr(text, name) != NULL : otherwise;
}

static int accepts(uint64_t flags, size_t size, const void *given) {
    uint32_t kind = ((const uint32_t *)given)[0], policy = ((const uint32_t *)given)[1];
    uintptr_t at = *(const uintptr_t *)((const char *)given + 16);
    uintptr_t alignment = asked("LAYER_FAULT", "aligned", 0) ? 1ul << 30 : 4096;
    struct stat file;
    if (!(flags & USE_HOST_PTR) || at % alignment) return 0;
    if (!(kind == 0x411D && asked("LAYER_TYPES", "dmabuf", 1)) && !(kind == 0x40A8 && asked("LAYER_TYPES", "ion", 1))) return 0;
    if (asked("LAYER_FAULT", "policy", 0) || (policy != 0x40A5 && policy != 0x40A9)) return 0;
    return !fstat(((const int *)given)[2], &file) && (size_t)file.st_size >= size;
}

static void *create_buffer(void *context, uint64_t flags, size_t size, void *host, int *status) {
    void *(*real)(void *, uint64_t, size_t, void *, int *) = below[CREATE_BUFFER];
    if (!(flags & EXT_HOST_PTR)) return real(context, flags, size, host, status);
    if (!accepts(flags, size, host)) {
        ++counts[1];
        if (status) *status = INVALID_VALUE;
        return NULL;
    }
    ++counts[0];
    host = *(void **)((char *)host + 16);
    if (asked("LAYER_FAULT", "stale", 0) || asked("LAYER_FAULT", "maps", 0)) {
        pages = host, pages_bytes = size;
        host = copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    return real(context, flags & ~(uint64_t)EXT_HOST_PTR, size, host, status);
}

static void *create_with_properties(void *context, const uint64_t *properties, uint64_t flags, size_t size,
                                    void *host, int *status) {
    void *(*real)(void *, uint64_t, size_t, void *, int *) = below[CREATE_BUFFER];
    (void)host;
    if (properties[0] != 0x2067 || properties[2]) return NULL;
    host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, (int)properties[1], 0);
    if (host == MAP_FAILED) return NULL;
    ++counts[0];
    return real(context, flags | USE_HOST_PTR, size, host, status);
}

static int acquire(void *queue, uint32_t count, void **memories, uint32_t waits, const void *list, void **event) {
    return queue && count == 1 && memories[0] && !waits && !list && !event ? 0 : INVALID_VALUE;
}

static void *look_up(void *platform, const char *name) {
    void *(*real)(void *, const char *) = below[LOOK_UP];
    return strcmp(name, "clEnqueueAcquireExternalMemObjectsKHR") ? real(platform, name) : (void *)acquire;
}

static void *map(void *queue, void *memory, uint32_t blocks, uint64_t flags, size_t offset, size_t size,
                 uint32_t waits, const void *list, void **event, int *status) {
    void *(*real)(void *, void *, uint32_t, uint64_t, size_t, size_t, uint32_t, const void *, void **, int *) = below[MAP];
    char *at = real(queue, memory, blocks, flags, offset, size, waits, list, event, status);
    if (asked("LAYER_FAULT", "maps", 0) && copy && at >= copy && at < copy + pages_bytes)
        memcpy(pages + (at - copy), at, size);
    return at;
}

static int unmap(void *queue, void *memory, void *at, uint32_t waits, const void *list, void **event) {
    int (*real)(void *, void *, void *, uint32_t, const void *, void **) = below[UNMAP];
    if (copy && (char *)at >= copy && (char *)at < copy + pages_bytes) memcpy(copy, pages, pages_bytes);
    return real(queue, memory, at, waits, list, event);
}

static int device_info(void *device, uint32_t name, size_t size, void *value, size_t *returned) {
    int (*real)(void *, uint32_t, size_t, void *, size_t *) = below[DEVICE_INFO];
    if (name == 0x40A0) { /* bytes of an allocation behind the buffer */
        if (value) *(size_t *)value = 0;
        if (returned) *returned = sizeof(size_t);
        return 0;
    }
    if (name != 0x1030) return real(device, name, size, value, returned);
    char text[16384];
    size_t length;
    int status = real(device, name, sizeof text - 200, text, &length);
    if (status) return status;
    strcat(text, " cl_qcom_ext_host_ptr cl_qcom_ext_host_ptr_iocoherent cl_qcom_dmabuf_host_ptr cl_qcom_ion_host_ptr");
    if (asked("LAYER_TYPES", "khr", 0)) strcat(text, " cl_khr_external_memory_dma_buf");
    length = strlen(text) + 1;
    if (value && size < length) return INVALID_VALUE;
    if (value) memcpy(value, text, length);
    if (returned) *returned = length;
    return 0;
}

int clGetLayerInfo(uint32_t name, size_t size, void *value, size_t *returned) {
    if (name != 0x4240) return INVALID_VALUE; /* the version of the interface of layers */
    if (value && size >= 4) *(uint32_t *)value = 100;
    if (returned) *returned = 4;
    return 0;
}

int clInitLayer(uint32_t entries, const void **table, uint32_t *own_entries, const void ***own_table) {
    memcpy(below, table, sizeof(void *) * (entries < TABLE ? entries : TABLE));
    memcpy(own, below, sizeof own);
    own[DEVICE_INFO] = device_info;
    own[CREATE_BUFFER] = create_buffer;
    own[LOOK_UP] = look_up;
    own[CREATE_WITH_PROPERTIES] = create_with_properties;
    own[MAP] = map;
    own[UNMAP] = unmap;
    *own_entries = entries, *own_table = (const void **)own;
    return 0;
}

long layer_count(int which) { return counts[which]; }
