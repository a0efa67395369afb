/* Streams, which do one operation after another in a thread, and events. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STREAMS = 64, OPERATIONS = 4096 };

struct operation { int what; address target; unsigned value; size_t count; struct local_event *event;
                   uint64_t number; void *staging; };
struct stream {
    int device;
    bool used, started, destroyed;
    pthread_t thread;
    struct operation queue[OPERATIONS];
    uint64_t begun, ended;
};
struct local_event { int index; uint64_t id; bool foreign; unsigned flags; uint64_t recorded, done;
                     int device; };

static struct stream streams[STREAMS]; /* the first of each device are the default ones */
/* By handle. One of a destroyed stream is given out again, as a driver does it, though
 * the stream may be at work for long. */
static struct stream *named[STREAMS];
static const uintptr_t FIRST_NAME = 0x3000;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void perform(struct operation *operation)
{
    struct local_event *event = operation->event;
    if (operation->what == 2) { /* wait for an event */
        pthread_mutex_lock(&mutex);
        while (event->done < operation->number)
            pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        return;
    }
    if (operation->what == 3) { /* a copy from the host's memory */
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        memcpy((void *)(uintptr_t)operation->target, operation->staging, operation->count);
        free(operation->staging);
        return;
    }
    pause_for("STANDIN_CUDA_DELAY");
    if (operation->what == 0) {
        unsigned *words = (unsigned *)(uintptr_t)operation->target;
        for (size_t i = 0; i < operation->count; i++)
            words[i] = operation->value;
        return;
    }
    /* What was recorded last counts, in whichever stream. */
    pthread_mutex_lock(&mutex);
    if (event->done < operation->number)
        event->done = operation->number;
    if (event->index >= 0)
        shared->events[event->index].done = event->done;
    pthread_mutex_unlock(&mutex);
}

static void *work(void *argument)
{
    struct stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&mutex);
        while (stream->begun == stream->ended)
            pthread_cond_wait(&changed, &mutex);
        struct operation operation = stream->queue[stream->ended % OPERATIONS];
        pthread_mutex_unlock(&mutex);
        perform(&operation);
        pthread_mutex_lock(&mutex);
        stream->ended++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }
    return NULL;
}

static struct stream *stream_of(void *handle)
{
    uintptr_t value = (uintptr_t)handle;
    int device = current_device();
    /* NULL and 1: the legacy default stream; 2: the calling thread's. */
    struct stream *stream
        = value <= 2 ? &streams[2 * device + (value == 2)] : named[value - FIRST_NAME];
    if (value <= 2)
        stream->device = device;
    stream->used = true;
    return stream;
}

static void enqueue(struct stream *stream, struct operation operation)
{
    pthread_mutex_lock(&mutex);
    if (!stream->started) {
        stream->started = true;
        pthread_create(&stream->thread, NULL, work, stream);
        pthread_detach(stream->thread);
    }
    while (stream->begun - stream->ended == OPERATIONS)
        pthread_cond_wait(&changed, &mutex);
    stream->queue[stream->begun % OPERATIONS] = operation;
    stream->begun++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void wait_for(struct stream *stream)
{
    pthread_mutex_lock(&mutex);
    uint64_t until = stream->begun;
    while (stream->ended < until)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

void wait_for_streams(int device)
{
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].used && streams[i].device == device)
            wait_for(&streams[i]);
}

void wait_for_default_stream(void) { wait_for(stream_of(NULL)); }

/* A driver copies from pageable memory to memory of its own, and returns; the bytes reach the
 * device a moment later. */
void copy_later(address target, const void *source, size_t size)
{
    void *staging = malloc(size);
    if (staging == NULL)
        abort();
    memcpy(staging, source, size);
    enqueue(stream_of(NULL), (struct operation){3, target, 0, size, NULL, 0, staging});
}

API int cuStreamCreate(void **stream, unsigned flags)
{
    int code = enter("cuStreamCreate", true, "flags=%u ", flags);
    if (code != SUCCESS)
        return code;
    int name = 0, place = 2 * DEVICES;
    pthread_mutex_lock(&mutex);
    while (name < STREAMS && named[name] != NULL)
        name++;
    while (place < STREAMS && streams[place].used
           && !(streams[place].destroyed && streams[place].begun == streams[place].ended))
        place++;
    if (name < STREAMS && place < STREAMS) {
        streams[place].used = true;
        streams[place].destroyed = false;
        streams[place].device = current_device();
        named[name] = &streams[place];
        *stream = (void *)(FIRST_NAME + name);
    } else
        code = OUT_OF_MEMORY;
    pthread_mutex_unlock(&mutex);
    return code;
}

/* Returns at once: what was asked of the stream is done all the same. */
API int cuStreamDestroy_v2(void *stream)
{
    int code = enter("cuStreamDestroy_v2", true, " ");
    if (code != SUCCESS)
        return code;
    pthread_mutex_lock(&mutex);
    stream_of(stream)->destroyed = true;
    named[(uintptr_t)stream - FIRST_NAME] = NULL;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

API int cuStreamSynchronize(void *stream)
{
    int code = enter("cuStreamSynchronize", true, " ");
    if (code == SUCCESS)
        wait_for(stream_of(stream));
    return code;
}

API int cuMemsetD32Async(address target, unsigned value, size_t count, void *stream)
{
    int code = enter("cuMemsetD32Async", true, "pointer=%#llx ", target);
    if (code == SUCCESS)
        enqueue(stream_of(stream), (struct operation){0, target, value, count, NULL, 0, NULL});
    return code;
}

API int cuEventCreate(struct local_event **event, unsigned flags)
{
    int code = enter("cuEventCreate", true, "flags=%u ", flags);
    if (code == SUCCESS && (flags & 4) && !(flags & 2))
        code = INVALID_VALUE;
    if (code != SUCCESS)
        return code;
    struct local_event *made = calloc(1, sizeof *made);
    *made = (struct local_event){.index = -1, .flags = flags, .device = current_device()};
    lock_state();
    for (int i = 0; (flags & 4) && i < EVENTS && made->index < 0; i++)
        if (shared->events[i].id == 0) {
            shared->events[i] = (struct event){++shared->next, me, 0, 0};
            made->index = i;
            made->id = shared->events[i].id;
        }
    unlock_state();
    *event = made;
    return SUCCESS;
}

API int cuEventDestroy_v2(struct local_event *event)
{
    int code = enter("cuEventDestroy_v2", true, " ");
    if (code != SUCCESS)
        return code;
    if (!event->foreign && event->index >= 0)
        memset(&shared->events[event->index], 0, sizeof shared->events[0]);
    free(event);
    return SUCCESS;
}

API int cuStreamWaitEvent(void *stream, struct local_event *event, unsigned flags)
{
    int code = enter("cuStreamWaitEvent", true, " ");
    if (code != SUCCESS || flags || event->foreign)
        return code ? code : INVALID_VALUE;
    enqueue(stream_of(stream), (struct operation){2, 0, 0, 0, event, event->recorded, NULL});
    return SUCCESS;
}

API int cuEventRecord(struct local_event *event, void *stream)
{
    int code = enter("cuEventRecord", true, " ");
    if (code != SUCCESS)
        return code;
    pthread_mutex_lock(&mutex);
    uint64_t number = ++event->recorded;
    pthread_mutex_unlock(&mutex);
    if (event->index >= 0)
        shared->events[event->index].recorded = number;
    enqueue(stream_of(stream), (struct operation){1, 0, 0, 0, event, number, NULL});
    return SUCCESS;
}

API int cuEventSynchronize(struct local_event *event)
{
    int code = enter("cuEventSynchronize", true, " ");
    if (code != SUCCESS)
        return code;
    if (event->index < 0) {
        pthread_mutex_lock(&mutex);
        while (event->done < event->recorded)
            pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        return SUCCESS;
    }
    volatile struct event *seen = &shared->events[event->index];
    if (seen->id != event->id)
        return INVALID_HANDLE;
    uint64_t until = seen->recorded;
    struct timespec time = {0, 100000};
    /* For ever, if the process has died that was to bring it about. */
    while (seen->done < until)
        nanosleep(&time, NULL);
    return SUCCESS;
}

API int cuEventQuery(struct local_event *event)
{
    int code = enter("cuEventQuery", true, " ");
    if (code != SUCCESS)
        return code;
    if (!event->foreign)
        return event->done < event->recorded ? NOT_READY : SUCCESS;
    volatile struct event *seen = &shared->events[event->index];
    return seen->id == event->id && seen->done < seen->recorded ? NOT_READY : SUCCESS;
}

struct event_handle { char mark[8]; uint64_t id; int32_t index, pid; };

API int cuIpcGetEventHandle(handle64 *handle, struct local_event *event)
{
    int code = enter("cuIpcGetEventHandle", true, " ");
    if (code == SUCCESS && event->index < 0)
        code = INVALID_HANDLE;
    if (code != SUCCESS)
        return code;
    struct event_handle found = {"event", event->id, event->index, getpid()};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &found, sizeof found);
    return SUCCESS;
}

API int cuIpcOpenEventHandle(struct local_event **event, handle64 handle)
{
    struct event_handle found;
    memcpy(&found, &handle, sizeof found);
    int code = enter("cuIpcOpenEventHandle", true, " ");
    if (code == SUCCESS
        && (strcmp(found.mark, "event") || found.index < 0 || found.index >= EVENTS
            || shared->events[found.index].id != found.id))
        code = INVALID_HANDLE;
    if (code == SUCCESS && found.pid == getpid())
        code = INVALID_CONTEXT;
    if (code != SUCCESS)
        return code;
    struct local_event *made = calloc(1, sizeof *made);
    *made = (struct local_event){.index = found.index, .id = found.id, .foreign = true,
                                 .device = current_device()};
    *event = made;
    return SUCCESS;
}
