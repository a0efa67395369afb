/* A stand-in for libcuda.so.1, for tests on machines without a GPU.
 *
 * "Device memory" is files of a folder, mapped by every process that opens them;
 * a "device pointer" is the address of the mapping. The folder is named by the
 * environment variable STANDIN_CUDA_FOLDER. What all processes must agree on is in
 * one file of it, `state`. Every call is written to another one, `log`.
 *
 * The stand-in is stricter than a driver: what a driver leaves undefined is a
 * line "VIOLATION" in the log.
 *
 * Environment:
 *   STANDIN_CUDA_FOLDER   where files go; without it there are no devices
 *   STANDIN_CUDA_FAIL     NAME:CODE[:COUNT],... calls that fail
 *   STANDIN_CUDA_DELAY    milliseconds that each operation of a stream takes
 *   STANDIN_CUDA_CLOSE    milliseconds that closing an imported mapping takes
 *   STANDIN_CUDA_NO_LOG   do not log calls, only violations
 *   CUDA_VISIBLE_DEVICES  as for a driver
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

enum kind { LEGACY = 1, MANAGED, HOST, POOLED, PHYSICAL };

enum { DEVICES = 2, PROCESSES = 256, OBJECTS = 32768, IMPORTS = 8192, EVENTS = 512, EXPORTS = 2048,
       POOLS = 64 };

typedef unsigned long long address;
typedef struct { unsigned char bytes[64]; } handle64;

struct object { uint64_t id; int32_t process, device, kind, pool, types; uint64_t size; };
struct import { uint64_t object; int32_t process, count; };
struct event { uint64_t id; int32_t process; uint64_t recorded, done; };
struct exported { uint64_t inode; uint64_t target; int32_t process; };
struct pool { uint64_t id; int32_t process, device, types, exported; };

/* What all processes share; under the lock. A process is alive while it holds
 * the lock on its byte, so one that is killed is found out. */
struct shared {
    uint64_t next;
    int32_t pids[PROCESSES];
    struct object objects[OBJECTS];
    struct import imports[IMPORTS];
    struct event events[EVENTS];
    struct exported exports[EXPORTS];
    struct pool pools[POOLS];
    uint64_t opened, closed, violations, exported;
};

/* A mapping of this process: its own memory, or another's. */
struct mapping {
    address base;
    uint64_t size, object;
    int device, kind, pool, types;
    bool imported;
};

extern struct shared *shared;
extern int me; /* index of this process */

void lock_state(void);
void unlock_state(void);
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
int enter(const char *name, bool needs_context, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool process_lives(int process);
void bury_the_dead(void);
int cuDeviceGetUuid_v2(unsigned char *uuid, int device);
int current_device(void); /* of the calling thread's context, -1 without one */
void pause_for(const char *variable);

/* memory.c */
struct object *new_object(int kind, int device, uint64_t size, int pool, int types);
struct object *find_object(uint64_t id);
struct mapping *find_mapping(address pointer);
struct mapping *map_object(const struct object *object, bool imported);
struct mapping *new_mapping(void);
int unmap(struct mapping *mapping);
void *map_file(uint64_t id, uint64_t size, void *where, int protection);
void drop_object(struct object *object);
bool add_import(uint64_t object);
void drop_import(uint64_t object);
bool imported_elsewhere(uint64_t object);
void memory_lock(void);
void memory_unlock(void);

/* streams.c */
void wait_for_streams(int device);
void wait_for_default_stream(void);
void copy_later(address target, const void *source, size_t size);

#define API __attribute__((visibility("default")))

#endif
