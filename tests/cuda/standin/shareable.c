/* Memory pools and virtual memory, which travel as file descriptors. */
#define _GNU_SOURCE
#include "standin.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { POSIX_FD = 1, GRANULARITY = 2 << 20, PHYSICALS = 512 };

struct location { int type, id; };
struct pool_properties { int type, handle_types; struct location location; void *security;
                         size_t most; unsigned short usage; unsigned char reserved[54]; };
struct properties { int type, handle_types; struct location location; void *security;
                    unsigned char flags[8]; };
struct access { struct location location; int flags; };
struct pointer_data { char mark[8]; uint64_t object, pool; unsigned char rest[40]; };

/* A handle of physical memory in this process. */
static struct { uint64_t object; int references, device, types; uint64_t size; bool imported; }
    physicals[PHYSICALS];

/* The descriptor is a socket: opening it by way of /proc is refused, and what it
 * stands for is known by its inode, as a driver knows it by the open file. No
 * document says that a driver makes it with O_CLOEXEC. */
static int export_descriptor(uint64_t target)
{
    int pair[2];
    struct stat status;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == -1)
        return -1;
    close(pair[1]);
    fstat(pair[0], &status);
    lock_state();
    shared->exports[shared->exported++ % EXPORTS] = (struct exported){status.st_ino, target, me};
    unlock_state();
    return pair[0];
}

static uint64_t imported_target(void *handle)
{
    struct stat status;
    if (fstat((int)(intptr_t)handle, &status) == -1)
        return 0;
    for (int i = 0; i < EXPORTS; i++)
        if (shared->exports[i].inode == status.st_ino)
            return shared->exports[i].target;
    return 0;
}

static int visible_to_physical(int ordinal)
{
    unsigned char uuid[16];
    return cuDeviceGetUuid_v2(uuid, ordinal) == SUCCESS ? uuid[15] - '0' : 0;
}

/* Pools. A handle is 0x1000 and the place in the table; place 0 and 1 are the default ones. */

static struct pool *pool_of(void *handle)
{
    uintptr_t place = (uintptr_t)handle - 0x1000;
    return place < POOLS ? &shared->pools[place] : NULL;
}

static int make_pool(int device, int types, int from)
{
    for (int i = from; i < POOLS; i++)
        if (shared->pools[i].id == 0) {
            shared->pools[i] = (struct pool){++shared->next, me, device, types, 0};
            return i;
        }
    return -1;
}

API int cuMemPoolCreate(void **pool, const struct pool_properties *properties)
{
    int code = enter("cuMemPoolCreate", false, "types=%d ", properties->handle_types);
    if (code != SUCCESS)
        return code;
    lock_state();
    int place = make_pool(visible_to_physical(properties->location.id),
                          properties->handle_types, 0);
    unlock_state();
    *pool = (void *)(uintptr_t)(0x1000 + place);
    return place < 0 ? OUT_OF_MEMORY : SUCCESS;
}

API int cuDeviceGetDefaultMemPool(void **pool, int device)
{
    static int places[DEVICES] = {-1, -1};
    int code = enter("cuDeviceGetDefaultMemPool", false, "device=%d ", device);
    int physical = visible_to_physical(device);
    lock_state();
    if (places[physical] < 0)
        places[physical] = make_pool(physical, 0, 0);
    unlock_state();
    *pool = (void *)(uintptr_t)(0x1000 + places[physical]);
    return code;
}

API int cuMemPoolDestroy(void *pool)
{
    int code = enter("cuMemPoolDestroy", false, " ");
    struct pool *found = pool_of(pool);
    if (code == SUCCESS && (uintptr_t)pool < 0x100000 && found != NULL && found->process == me)
        memset(found, 0, sizeof *found);
    return code;
}

API int cuMemAllocFromPoolAsync(address *pointer, size_t size, void *pool, void *stream)
{
    int code = enter("cuMemAllocFromPoolAsync", true, "size=%zu ", size);
    struct pool *found = pool_of(pool);
    (void)stream;
    if (code == SUCCESS && (found == NULL || found->id == 0 || found->process != me))
        code = INVALID_VALUE;
    if (code != SUCCESS)
        return code;
    memory_lock();
    lock_state();
    struct object *object = new_object(POOLED, found->device, size,
                                       (int)(found - shared->pools), found->types);
    struct mapping *mapping = object == NULL ? NULL : map_object(object, false);
    unlock_state();
    *pointer = mapping == NULL ? 0 : mapping->base;
    memory_unlock();
    return mapping == NULL ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemFreeAsync(address pointer, void *stream)
{
    int cuMemFree_v2(address);
    (void)stream;
    return cuMemFree_v2(pointer);
}

API int cuMemPoolExportToShareableHandle(int *descriptor, void *pool, int type,
                                         unsigned long long flags)
{
    int code = enter("cuMemPoolExportToShareableHandle", false, " ");
    struct pool *found = pool_of(pool);
    if (code == SUCCESS && (found == NULL || !(found->types & POSIX_FD) || type != POSIX_FD || flags))
        code = INVALID_VALUE;
    if (code == SUCCESS && (*descriptor = export_descriptor(found->id)) == -1)
        code = OUT_OF_MEMORY;
    if (code == SUCCESS)
        found->exported = 1;
    return code;
}

API int cuMemPoolImportFromShareableHandle(void **pool, void *handle, int type,
                                           unsigned long long flags)
{
    int code = enter("cuMemPoolImportFromShareableHandle", false, " ");
    if (code != SUCCESS || type != POSIX_FD || flags)
        return code ? code : INVALID_VALUE;
    lock_state();
    bury_the_dead();
    uint64_t target = imported_target(handle);
    unlock_state();
    if (target == 0)
        return INVALID_VALUE;
    /* Far from the handles of one's own pools. */
    *pool = (void *)(uintptr_t)(0x100000 + target);
    return SUCCESS;
}

API int cuMemPoolExportPointer(struct pointer_data *data, address pointer)
{
    int code = enter("cuMemPoolExportPointer", false, "pointer=%#llx ", pointer);
    memory_lock();
    struct mapping *mapping = find_mapping(pointer);
    if (code == SUCCESS && (mapping == NULL || mapping->kind != POOLED || mapping->imported
                            || mapping->base != pointer || !(mapping->types & POSIX_FD)
                            /* as driver 580 has it */
                            || !shared->pools[mapping->pool].exported))
        code = INVALID_VALUE;
    if (code == SUCCESS) {
        memset(data, 0, sizeof *data);
        memcpy(data->mark, "pointer", 8);
        data->object = mapping->object;
        data->pool = shared->pools[mapping->pool].id;
    }
    memory_unlock();
    return code;
}

API int cuMemPoolImportPointer(address *pointer, void *pool, struct pointer_data *data)
{
    int code = enter("cuMemPoolImportPointer", false, "memory-%llu ",
                     (unsigned long long)data->object);
    if (code == SUCCESS && (strcmp(data->mark, "pointer")
                            || (uintptr_t)pool != 0x100000 + data->pool))
        code = INVALID_VALUE;
    if (code != SUCCESS)
        return code;
    memory_lock();
    lock_state();
    bury_the_dead();
    struct object *object = find_object(data->object);
    struct mapping *mapping = NULL;
    if (object == NULL || object->process == me)
        code = INVALID_VALUE;
    else if ((mapping = map_object(object, true)) == NULL || !add_import(data->object))
        code = OUT_OF_MEMORY;
    unlock_state();
    if (code == SUCCESS)
        *pointer = mapping->base;
    memory_unlock();
    return code;
}

/* Virtual memory. A handle is 0x2000 and the place in the table. */

static int new_physical(uint64_t object, int device, int types, uint64_t size, bool imported)
{
    for (int i = 0; i < PHYSICALS; i++)
        if (physicals[i].references == 0) {
            physicals[i].object = object;
            physicals[i].references = 1;
            physicals[i].device = device;
            physicals[i].types = types;
            physicals[i].size = size;
            physicals[i].imported = imported;
            return i;
        }
    return -1;
}

static void drop_physical(int place)
{
    if (--physicals[place].references)
        return;
    lock_state();
    if (physicals[place].imported) {
        drop_import(physicals[place].object);
    } else {
        struct object *object = find_object(physicals[place].object);
        if (imported_elsewhere(physicals[place].object))
            violation("memory-%llu was freed while another process has it open",
                      (unsigned long long)physicals[place].object);
        if (object != NULL)
            drop_object(object);
    }
    unlock_state();
}

static int place_of(uint64_t handle)
{
    return handle >= 0x2000 && handle < 0x2000 + PHYSICALS && physicals[handle - 0x2000].references
               ? (int)(handle - 0x2000) : -1;
}

static int physical_of(uint64_t object)
{
    for (int i = 0; i < PHYSICALS; i++)
        if (physicals[i].references && physicals[i].object == object)
            return i;
    return -1;
}

API int cuMemGetAllocationGranularity(size_t *size, const struct properties *properties, int option)
{
    (void)properties, (void)option;
    *size = GRANULARITY;
    return enter("cuMemGetAllocationGranularity", false, " ");
}

API int cuMemCreate(uint64_t *handle, size_t size, const struct properties *properties,
                    unsigned long long flags)
{
    int code = enter("cuMemCreate", false, "size=%zu types=%d ", size, properties->handle_types);
    if (code == SUCCESS && (flags || size == 0 || size % GRANULARITY))
        code = INVALID_VALUE;
    if (code != SUCCESS)
        return code;
    int device = visible_to_physical(properties->location.id);
    memory_lock();
    lock_state();
    struct object *object = new_object(PHYSICAL, device, size, 0, properties->handle_types);
    unlock_state();
    int place = object == NULL ? -1
                               : new_physical(object->id, device, properties->handle_types, size,
                                              false);
    memory_unlock();
    *handle = 0x2000 + place;
    return place < 0 ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemRelease(uint64_t handle)
{
    int code = enter("cuMemRelease", false, " ");
    memory_lock();
    int place = place_of(handle);
    if (code == SUCCESS && place < 0)
        code = INVALID_VALUE;
    if (code == SUCCESS)
        drop_physical(place);
    memory_unlock();
    return code;
}

API int cuMemAddressReserve(address *pointer, size_t size, size_t alignment, address wanted,
                            unsigned long long flags)
{
    int code = enter("cuMemAddressReserve", false, "size=%zu ", size);
    (void)alignment, (void)wanted;
    if (code != SUCCESS || flags || size % GRANULARITY)
        return code ? code : INVALID_VALUE;
    void *bytes = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *pointer = (address)(uintptr_t)bytes;
    return bytes == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

API int cuMemAddressFree(address pointer, size_t size)
{
    int code = enter("cuMemAddressFree", false, "size=%zu ", size);
    if (code == SUCCESS)
        munmap((void *)(uintptr_t)pointer, size);
    return code;
}

API int cuMemMap(address pointer, size_t size, size_t offset, uint64_t handle,
                 unsigned long long flags)
{
    int code = enter("cuMemMap", false, "size=%zu ", size);
    memory_lock();
    int place = place_of(handle);
    if (code == SUCCESS && (place < 0 || offset || flags || size != physicals[place].size))
        code = INVALID_VALUE;
    if (code == SUCCESS) {
        map_file(physicals[place].object, size, (void *)(uintptr_t)pointer, PROT_NONE);
        physicals[place].references++;
        *new_mapping() = (struct mapping){pointer, size, physicals[place].object,
                                          physicals[place].device, PHYSICAL, 0,
                                          physicals[place].types, physicals[place].imported};
    }
    memory_unlock();
    return code;
}

API int cuMemSetAccess(address pointer, size_t size, const struct access *access, size_t count)
{
    int code = enter("cuMemSetAccess", false, "size=%zu ", size);
    if (code == SUCCESS && (count != 1 || access->flags != 3 || access->location.type != 1))
        code = INVALID_VALUE;
    if (code == SUCCESS)
        mprotect((void *)(uintptr_t)pointer, size, PROT_READ | PROT_WRITE);
    return code;
}

API int cuMemUnmap(address pointer, size_t size)
{
    int code = enter("cuMemUnmap", false, "size=%zu ", size);
    if (code != SUCCESS)
        return code;
    pause_for("STANDIN_CUDA_CLOSE");
    memory_lock();
    address end = pointer + size;
    while (pointer < end && code == SUCCESS) {
        struct mapping *mapping = find_mapping(pointer);
        if (mapping == NULL || mapping->base != pointer || mapping->kind != PHYSICAL) {
            code = INVALID_VALUE;
            break;
        }
        pointer += mapping->size;
        int place = physical_of(mapping->object);
        mmap((void *)(uintptr_t)mapping->base, mapping->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        memset(mapping, 0, sizeof *mapping);
        drop_physical(place);
    }
    memory_unlock();
    return code;
}

API int cuMemRetainAllocationHandle(uint64_t *handle, void *pointer)
{
    int code = enter("cuMemRetainAllocationHandle", false, " ");
    memory_lock();
    struct mapping *mapping = find_mapping((address)(uintptr_t)pointer);
    if (code == SUCCESS && (mapping == NULL || mapping->kind != PHYSICAL))
        code = INVALID_VALUE;
    if (code == SUCCESS) {
        int place = physical_of(mapping->object);
        physicals[place].references++;
        *handle = 0x2000 + place;
    }
    memory_unlock();
    return code;
}

API int cuMemExportToShareableHandle(int *descriptor, uint64_t handle, int type,
                                     unsigned long long flags)
{
    int code = enter("cuMemExportToShareableHandle", false, " ");
    memory_lock();
    int place = place_of(handle);
    if (code == SUCCESS && (place < 0 || type != POSIX_FD || flags
                            || !(physicals[place].types & POSIX_FD)))
        code = INVALID_VALUE;
    if (code == SUCCESS && (*descriptor = export_descriptor(physicals[place].object)) == -1)
        code = OUT_OF_MEMORY;
    memory_unlock();
    return code;
}

API int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type)
{
    int code = enter("cuMemImportFromShareableHandle", false, " ");
    if (code != SUCCESS || type != POSIX_FD)
        return code ? code : INVALID_VALUE;
    memory_lock();
    lock_state();
    bury_the_dead();
    uint64_t target = imported_target(descriptor);
    struct object *object = target ? find_object(target) : NULL;
    int place = -1;
    if (object == NULL)
        code = INVALID_VALUE;
    else if (!add_import(target)
             || (place = new_physical(target, object->device, object->types, object->size, true))
                    < 0)
        code = OUT_OF_MEMORY;
    unlock_state();
    memory_unlock();
    *handle = 0x2000 + place;
    return code;
}
