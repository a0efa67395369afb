/* Allocations, what is known about a pointer, and legacy IPC handles. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAPPINGS = 32768, PAGE = 4096, POISON = 0xDD };

static struct mapping mappings[MAPPINGS];
static int highest;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* Addresses of freed memory, to be given out again: a driver does so, too. */
static struct { address base; uint64_t size; } freed[256];

/* Without padding, whose bytes would differ from one handle of the same memory to another. */
struct legacy {
    char mark[8];
    uint64_t object, size, check;
    int32_t process, pid, device, unused;
};

void memory_lock(void) { pthread_mutex_lock(&mutex); }
void memory_unlock(void) { pthread_mutex_unlock(&mutex); }

static uint64_t whole_pages(uint64_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

static void path_of(uint64_t id, char *path, size_t length)
{
    snprintf(path, length, "%s/memory-%llu", getenv("STANDIN_CUDA_FOLDER"),
             (unsigned long long)id);
}

struct object *new_object(int kind, int device, uint64_t size, int pool, int types)
{
    for (int i = 0; i < OBJECTS; i++) {
        struct object *object = &shared->objects[i];
        if (object->id)
            continue;
        *object = (struct object){++shared->next, me, device, kind, pool, types, size};
        return object;
    }
    return NULL;
}

struct object *find_object(uint64_t id)
{
    for (int i = 0; i < OBJECTS; i++)
        if (shared->objects[i].id == id)
            return &shared->objects[i];
    return NULL;
}

void drop_object(struct object *object)
{
    char path[512];
    path_of(object->id, path, sizeof path);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file != -1) {
        unsigned char *bytes = mmap(NULL, whole_pages(object->size), PROT_READ | PROT_WRITE,
                                    MAP_SHARED, file, 0);
        if (bytes != MAP_FAILED) {
            memset(bytes, POISON, object->size < 1 << 24 ? object->size : 1 << 24);
            munmap(bytes, whole_pages(object->size));
        }
        close(file);
    }
    unlink(path);
    memset(object, 0, sizeof *object);
}

bool add_import(uint64_t object)
{
    for (int i = 0; i < IMPORTS; i++)
        if (shared->imports[i].object == 0) {
            shared->imports[i] = (struct import){object, me, 1};
            shared->opened++;
            return true;
        }
    return false;
}

void drop_import(uint64_t object)
{
    for (int i = 0; i < IMPORTS; i++)
        if (shared->imports[i].object == object && shared->imports[i].process == me) {
            memset(&shared->imports[i], 0, sizeof shared->imports[i]);
            shared->closed++;
            return;
        }
}

bool imported_elsewhere(uint64_t object)
{
    for (int i = 0; i < IMPORTS; i++)
        if (shared->imports[i].object == object && process_lives(shared->imports[i].process))
            return true;
    return false;
}

struct mapping *find_mapping(address pointer)
{
    for (int i = 0; i < highest; i++)
        if (mappings[i].size && pointer >= mappings[i].base
            && pointer < mappings[i].base + mappings[i].size)
            return &mappings[i];
    return NULL;
}

struct mapping *new_mapping(void)
{
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].size == 0) {
            if (i >= highest)
                highest = i + 1;
            return &mappings[i];
        }
    abort();
}

void *map_file(uint64_t id, uint64_t size, void *where, int protection)
{
    char path[512];
    path_of(id, path, sizeof path);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file == -1 || ftruncate(file, whole_pages(size)) == -1)
        abort();
    void *bytes = mmap(where, whole_pages(size), protection, MAP_SHARED | (where ? MAP_FIXED : 0),
                       file, 0);
    close(file);
    return bytes == MAP_FAILED ? NULL : bytes;
}

static void *take_freed(uint64_t size)
{
    for (int i = 0; i < 256; i++)
        if (freed[i].size == whole_pages(size)) {
            freed[i].size = 0;
            return (void *)(uintptr_t)freed[i].base;
        }
    return NULL;
}

struct mapping *map_object(const struct object *object, bool imported)
{
    void *where = imported ? NULL : take_freed(object->size);
    void *bytes = map_file(object->id, object->size, where, PROT_READ | PROT_WRITE);
    if (bytes == NULL)
        return NULL;
    struct mapping *mapping = new_mapping();
    *mapping = (struct mapping){(address)(uintptr_t)bytes, object->size, object->id,
                                object->device, object->kind, object->pool, object->types,
                                imported};
    return mapping;
}

/* Nothing can be there by chance: a late access is a fault. */
int unmap(struct mapping *mapping)
{
    void *where = (void *)(uintptr_t)mapping->base;
    uint64_t size = whole_pages(mapping->size);
    if (mapping->imported) {
        munmap(where, size);
    } else {
        mmap(where, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0);
        int i = 0;
        while (i < 255 && freed[i].size)
            i++;
        if (freed[i].size)
            munmap((void *)(uintptr_t)freed[i].base, freed[i].size);
        freed[i].base = mapping->base;
        freed[i].size = size;
    }
    memset(mapping, 0, sizeof *mapping);
    return SUCCESS;
}

static int allocate(const char *name, address *pointer, uint64_t size, int kind)
{
    int code = enter(name, true, "size=%llu ", (unsigned long long)size);
    if (code != SUCCESS || size == 0)
        return code ? code : INVALID_VALUE;
    memory_lock();
    lock_state();
    struct object *object = new_object(kind, current_device(), size, 0, 0);
    struct mapping *mapping = object == NULL ? NULL : map_object(object, false);
    unlock_state();
    *pointer = mapping == NULL ? 0 : mapping->base;
    memory_unlock();
    return mapping == NULL ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemAlloc_v2(address *pointer, size_t size)
{
    return allocate("cuMemAlloc_v2", pointer, size, LEGACY);
}

API int cuMemAllocManaged(address *pointer, size_t size, unsigned flags)
{
    (void)flags;
    return allocate("cuMemAllocManaged", pointer, size, MANAGED);
}

API int cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
    (void)flags;
    return allocate("cuMemHostAlloc", (address *)pointer, size, HOST);
}

API int cuMemFree_v2(address pointer)
{
    int code = enter("cuMemFree_v2", true, "pointer=%#llx ", pointer);
    if (code != SUCCESS)
        return code;
    wait_for_streams(current_device());
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    if (mapping == NULL || mapping->base != pointer) {
        memory_unlock();
        return INVALID_VALUE;
    }
    lock_state();
    if (mapping->imported) {
        drop_import(mapping->object);
    } else {
        bury_the_dead();
        if (imported_elsewhere(mapping->object))
            violation("memory-%llu was freed while another process has it open",
                      (unsigned long long)mapping->object);
        struct object *object = find_object(mapping->object);
        if (object != NULL)
            drop_object(object);
    }
    unlock_state();
    unmap(mapping);
    memory_unlock();
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    int code = enter("cuMemGetInfo_v2", true, " ");
    if (code != SUCCESS)
        return code;
    *total = *available = (size_t)64 << 30;
    lock_state();
    bury_the_dead();
    for (int i = 0; i < OBJECTS; i++)
        if (shared->objects[i].id && shared->objects[i].device == current_device())
            *available -= shared->objects[i].size;
    unlock_state();
    return SUCCESS;
}

API int cuMemFreeHost(void *pointer)
{
    return cuMemFree_v2((address)(uintptr_t)pointer);
}

API int cuMemGetAddressRange_v2(address *base, size_t *size, address pointer)
{
    int code = enter("cuMemGetAddressRange_v2", true, "pointer=%#llx ", pointer);
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    if (mapping == NULL)
        code = code ? code : INVALID_VALUE;
    else {
        *base = mapping->base;
        *size = mapping->size;
    }
    memory_unlock();
    return code;
}

static int attribute_of(const struct mapping *mapping, int attribute, void *value)
{
    switch (attribute) {
    case 1: /* the context; there is none for pools and virtual memory */
        *(void **)value = NULL;
        return SUCCESS;
    case 2: /* memory type: host or device */
        *(unsigned *)value = mapping->kind == HOST ? 1 : 2;
        return SUCCESS;
    case 8: /* managed */
        *(bool *)value = mapping->kind == MANAGED;
        return SUCCESS;
    case 9: { /* ordinal */
        unsigned char uuid[16];
        *(int *)value = 0;
        for (int i = 0; i < DEVICES; i++)
            if (cuDeviceGetUuid_v2(uuid, i) == SUCCESS && uuid[15] == '0' + mapping->device)
                *(int *)value = i;
        return SUCCESS;
    }
    case 10: /* may have a legacy handle */
        *(bool *)value = mapping->kind == LEGACY && !mapping->imported;
        return SUCCESS;
    case 14: /* allowed handle types */
        *(uint64_t *)value = mapping->kind == LEGACY ? 0 : mapping->types;
        return SUCCESS;
    case 17: /* pool */
        *(uint64_t *)value = mapping->kind == POOLED ? 0x1000 + mapping->pool : 0;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

/* Of an address that it does not know, a driver says 0 to all, and -2 to the ordinal. */
API int cuPointerGetAttributes(unsigned count, const int *attributes, void **values,
                               address pointer)
{
    int code = enter("cuPointerGetAttributes", false, "pointer=%#llx ", pointer);
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    for (unsigned i = 0; i < count && code == SUCCESS; i++)
        if (mapping != NULL)
            code = attribute_of(mapping, attributes[i], values[i]);
        else
            *(unsigned *)values[i] = attributes[i] == 9 ? -2 : 0;
    memory_unlock();
    return code;
}

API int cuIpcGetMemHandle(handle64 *handle, address pointer)
{
    int code = enter("cuIpcGetMemHandle", true, "pointer=%#llx ", pointer);
    if (code != SUCCESS)
        return code;
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    if (mapping == NULL || mapping->kind != LEGACY || mapping->imported) {
        memory_unlock();
        return INVALID_VALUE;
    }
    /* An interior pointer gives the handle of the whole. */
    struct legacy legacy = {"standin", mapping->object, mapping->size,
                            mapping->object ^ mapping->size, me, getpid(), mapping->device, 0};
    memory_unlock();
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &legacy, sizeof legacy);
    return SUCCESS;
}

static bool open_here(uint64_t object)
{
    for (int i = 0; i < highest; i++)
        if (mappings[i].imported && mappings[i].object == object)
            return true;
    return false;
}

API int cuIpcOpenMemHandle_v2(address *pointer, handle64 handle, unsigned flags)
{
    struct legacy legacy;
    memcpy(&legacy, &handle, sizeof legacy);
    int code = enter("cuIpcOpenMemHandle_v2", true, "memory-%llu flags=%u ",
                     (unsigned long long)legacy.object, flags);
    if (code != SUCCESS)
        return code;
    if (strcmp(legacy.mark, "standin") || legacy.check != (legacy.object ^ legacy.size)
        || flags != 1)
        return INVALID_VALUE;
    if (legacy.pid == getpid())
        return INVALID_CONTEXT;
    if (legacy.device != current_device())
        return PEER_ACCESS_UNSUPPORTED;
    memory_lock();
    lock_state();
    bury_the_dead();
    struct object *object = find_object(legacy.object);
    struct mapping *mapping = NULL;
    if (open_here(legacy.object))
        code = ALREADY_MAPPED;
    else if (object == NULL)
        code = INVALID_VALUE;
    else if ((mapping = map_object(object, true)) == NULL || !add_import(legacy.object))
        code = OUT_OF_MEMORY;
    unlock_state();
    if (code == SUCCESS)
        *pointer = mapping->base;
    memory_unlock();
    return code;
}

API int cuIpcCloseMemHandle(address pointer)
{
    int code = enter("cuIpcCloseMemHandle", true, "pointer=%#llx ", pointer);
    if (code != SUCCESS)
        return code;
    pause_for("STANDIN_CUDA_CLOSE");
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    if (mapping == NULL || !mapping->imported || mapping->base != pointer) {
        memory_unlock();
        return INVALID_VALUE;
    }
    lock_state();
    drop_import(mapping->object);
    unlock_state();
    unmap(mapping);
    memory_unlock();
    return SUCCESS;
}

API int cuMemcpyDtoH_v2(void *target, address source, size_t size)
{
    int code = enter("cuMemcpyDtoH_v2", true, "pointer=%#llx ", source);
    if (code == SUCCESS) {
        wait_for_default_stream();
        memcpy(target, (void *)(uintptr_t)source, size);
    }
    return code;
}

API int cuMemcpyHtoD_v2(address target, const void *source, size_t size)
{
    int code = enter("cuMemcpyHtoD_v2", true, "pointer=%#llx ", target);
    if (code == SUCCESS)
        copy_later(target, source, size);
    return code;
}
