/* What processes share, devices, contexts, the log, and failures on demand. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct shared *shared;
int me = -1;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int state_file = -1, life_file = -1, log_file = -1;
static pid_t initialised_by;
static int visible[DEVICES], visible_count;

struct context { int device; };
static struct context primary[DEVICES] = {{0}, {1}};
static bool retained[DEVICES];
static __thread struct context *stack[16];
static __thread int depth;

struct failure { char name[64]; int code, count; };
static struct failure failures[16];

static void change_lock(int file, short type, off_t byte)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(file, F_OFD_SETLKW, &lock) == -1)
        continue;
}

void lock_state(void)
{
    pthread_mutex_lock(&mutex);
    change_lock(state_file, F_WRLCK, 1 << 20);
}

void unlock_state(void)
{
    change_lock(state_file, F_UNLCK, 1 << 20);
    pthread_mutex_unlock(&mutex);
}

static void write_line(const char *line, int length)
{
    if (log_file != -1 && write(log_file, line, length) != length)
        abort();
}

void violation(const char *format, ...)
{
    char text[256], line[320];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    shared->violations++;
    write_line(line, snprintf(line, sizeof line, "%d VIOLATION %s\n", getpid(), text));
}

static int injected(const char *name)
{
    for (int i = 0; i < 16; i++)
        if (failures[i].count > 0 && strcmp(failures[i].name, name) == 0) {
            failures[i].count--;
            return failures[i].code;
        }
    return SUCCESS;
}

int enter(const char *name, bool needs_context, const char *format, ...)
{
    char text[256] = "", line[384];
    int code = injected(name);
    if (code == SUCCESS && initialised_by != getpid())
        code = NOT_INITIALIZED;
    if (code == SUCCESS && needs_context && depth == 0)
        code = INVALID_CONTEXT;
    if (getenv("STANDIN_CUDA_NO_LOG") == NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        write_line(line,
                   snprintf(line, sizeof line, "%d %s %s= %d\n", getpid(), name, text, code));
    }
    return code;
}

void pause_for(const char *variable)
{
    const char *text = getenv(variable);
    long milliseconds = text == NULL ? 0 : atol(text);
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

bool process_lives(int process)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = process, .l_len = 1};
    if (process == me)
        return true;
    return fcntl(life_file, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* What a driver does when a process ends: its memory and its mappings go. */
void bury_the_dead(void)
{
    for (int process = 0; process < PROCESSES; process++) {
        if (shared->pids[process] == 0 || process_lives(process))
            continue;
        for (int i = 0; i < OBJECTS; i++)
            if (shared->objects[i].id && shared->objects[i].process == process)
                drop_object(&shared->objects[i]);
        for (int i = 0; i < IMPORTS; i++)
            if (shared->imports[i].process == process)
                memset(&shared->imports[i], 0, sizeof shared->imports[i]);
        for (int i = 0; i < EVENTS; i++)
            if (shared->events[i].process == process)
                memset(&shared->events[i], 0, sizeof shared->events[i]);
        for (int i = 0; i < EXPORTS; i++)
            if (shared->exports[i].process == process)
                memset(&shared->exports[i], 0, sizeof shared->exports[i]);
        for (int i = 0; i < POOLS; i++)
            if (shared->pools[i].process == process)
                memset(&shared->pools[i], 0, sizeof shared->pools[i]);
        shared->pids[process] = 0;
    }
}

static int open_in_folder(const char *name, int flags)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", getenv("STANDIN_CUDA_FOLDER"), name);
    return open(path, flags | O_CREAT | O_CLOEXEC, 0600);
}

static void read_failures(const char *text)
{
    for (int i = 0; text != NULL && *text && i < 16; i++) {
        failures[i].count = 1;
        sscanf(text, "%63[^:]:%d:%d", failures[i].name, &failures[i].code, &failures[i].count);
        text = strchr(text, ',');
        text = text == NULL ? NULL : text + 1;
    }
}

static void find_devices(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (text == NULL)
        text = "0,1";
    for (visible_count = 0; *text && visible_count < DEVICES; text++)
        if (*text >= '0' && *text < '0' + DEVICES)
            visible[visible_count++] = *text - '0';
}

API int cuInit(unsigned flags)
{
    static bool started;
    if (flags != 0)
        return INVALID_VALUE;
    if (getenv("STANDIN_CUDA_FOLDER") == NULL)
        return NO_DEVICE;
    if (started)
        return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED;
    started = true;
    read_failures(getenv("STANDIN_CUDA_FAIL"));
    find_devices();
    log_file = open_in_folder("log", O_WRONLY | O_APPEND);
    state_file = open_in_folder("state", O_RDWR);
    life_file = open_in_folder("lives", O_RDWR);
    if (state_file == -1 || ftruncate(state_file, sizeof *shared) == -1)
        return NO_DEVICE;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, state_file, 0);
    if (shared == MAP_FAILED)
        return NO_DEVICE;
    initialised_by = getpid();
    lock_state();
    bury_the_dead();
    for (me = 0; shared->pids[me] != 0; me++)
        if (me == PROCESSES - 1)
            abort();
    int process = me;
    me = -1;
    change_lock(life_file, F_WRLCK, process);
    me = process;
    shared->pids[me] = getpid();
    unlock_state();
    int code = enter("cuInit", false, " ");
    return code != SUCCESS ? code : visible_count ? SUCCESS : NO_DEVICE;
}

API int cuDriverGetVersion(int *version)
{
    *version = 12040;
    return SUCCESS;
}

API int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } names[] = {
        {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED"},
        {PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *name = names[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

API int cuDeviceGetCount(int *count)
{
    *count = visible_count;
    return enter("cuDeviceGetCount", false, " ");
}

API int cuDeviceGet(int *device, int ordinal)
{
    int code = enter("cuDeviceGet", false, "ordinal=%d ", ordinal);
    if (code == SUCCESS && (ordinal < 0 || ordinal >= visible_count))
        code = INVALID_DEVICE;
    *device = ordinal;
    return code;
}

API int cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, length, "Stand-in %d", visible[device]);
    return enter("cuDeviceGetName", false, "device=%d ", device);
}

API int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    memcpy(uuid, "STANDIN-DEVICE-", 15);
    uuid[15] = '0' + visible[device];
    return enter("cuDeviceGetUuid_v2", false, "device=%d ", device);
}

API int cuDevicePrimaryCtxRetain(struct context **context, int device)
{
    int code = enter("cuDevicePrimaryCtxRetain", false, "device=%d ", device);
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    *context = &primary[visible[device]];
    retained[device] = retained[device] || code == SUCCESS;
    return code;
}

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    int code = enter("cuDevicePrimaryCtxGetState", false, "device=%d ", device);
    if (device < 0 || device >= visible_count)
        return INVALID_DEVICE;
    *flags = 0;
    *active = retained[device];
    return code;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
    return enter("cuDevicePrimaryCtxRelease_v2", false, "device=%d ", device);
}

API int cuCtxPushCurrent_v2(struct context *context)
{
    int code = enter("cuCtxPushCurrent_v2", false, " ");
    if (code != SUCCESS || context == NULL)
        return code ? code : INVALID_CONTEXT;
    if (depth == 16)
        return OUT_OF_MEMORY;
    stack[depth++] = context;
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(struct context **context)
{
    int code = enter("cuCtxPopCurrent_v2", true, " ");
    if (code != SUCCESS)
        return code;
    depth--;
    if (context != NULL)
        *context = stack[depth];
    return SUCCESS;
}

API int cuCtxGetCurrent(struct context **context)
{
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

API int cuCtxSynchronize(void)
{
    int code = enter("cuCtxSynchronize", true, " ");
    if (code == SUCCESS)
        wait_for_streams(current_device());
    return code;
}

int current_device(void)
{
    return depth ? stack[depth - 1]->device : -1;
}

/* For tests. */

API void standin_fail(const char *name, int code, int count)
{
    for (int i = 0; i < 16; i++)
        if (failures[i].count <= 0) {
            snprintf(failures[i].name, sizeof failures[i].name, "%s", name);
            failures[i].code = code;
            failures[i].count = count;
            return;
        }
}

API int standin_depth(void)
{
    return depth;
}

/* Bytes of device memory, mappings of others' memory, opened, closed, violations. */
API void standin_state(uint64_t found[5])
{
    memset(found, 0, 5 * sizeof *found);
    lock_state();
    bury_the_dead();
    for (int i = 0; i < OBJECTS; i++)
        if (shared->objects[i].id)
            found[0] += shared->objects[i].size;
    for (int i = 0; i < IMPORTS; i++)
        if (shared->imports[i].object)
            found[1]++;
    found[2] = shared->opened;
    found[3] = shared->closed;
    found[4] = shared->violations;
    unlock_state();
}
