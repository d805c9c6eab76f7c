/*
 * One-sided writes over UCX: what transport/native.py calls through ctypes, and nothing more.
 *
 * Built without linking libucp: its symbols come from the library that the process has opened
 * with RTLD_GLOBAL, so one binary serves every UCX from 1.13 on.
 *
 * Functions return 0 or a negative ucs_status_t; DKX_TIMEOUT is the one code of our own.
 */
#define _GNU_SOURCE
#include "common.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <ucp/api/ucp.h>

enum { DKX_TIMEOUT = -1000, DKX_TOO_SMALL = -1001, DKX_THREAD = -1002 };
enum { API_MAJOR = 1, API_MINOR = 13, IDLE_ROUNDS = 64, POLL_MS = 100 };

typedef struct {
    ucp_context_h context;
    ucp_worker_h worker;
    int event_fd;
    pthread_t thread;
    uint32_t *bell;
    atomic_int running;
} dkx_worker;

typedef struct {
    dkx_worker *worker;
    ucp_ep_h endpoint;
    atomic_int status; /* set by UCX when the peer is gone */
    uint64_t word;     /* what the last write put last */
    uint32_t *bell;    /* of the last write; NULL where this process cannot reach it */
} dkx_peer;

typedef struct {
    ucp_mem_h handle;
    void *address;
} dkx_region;

static int copy_out(const void *source, size_t length, void *buffer, size_t *capacity)
{
    if (length > *capacity)
        return DKX_TOO_SMALL;
    memcpy(buffer, source, length);
    *capacity = length;
    return 0;
}

const char *dkx_version(void) { return ucp_get_version_string(); }

const char *dkx_error(int status)
{
    switch (status) {
    case DKX_TIMEOUT:
        return "deadline passed";
    case DKX_TOO_SMALL:
        return "buffer too small";
    case DKX_THREAD:
        return "no thread could be started";
    default:
        return ucs_status_string(status);
    }
}

/* ---- worker ---- */

void dkx_worker_close(dkx_worker *w)
{
    if (w->worker)
        ucp_worker_destroy(w->worker);
    if (w->context)
        ucp_cleanup(w->context);
    free(w);
}

int dkx_worker_open(dkx_worker **out)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP};
    /* SINGLE crashed with puts from several threads, SERIALIZED hung; MULTI costs no latency. */
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                         .thread_mode = UCS_THREAD_MODE_MULTI};
    dkx_worker *w = calloc(1, sizeof *w);
    int status;

    if (!w)
        return UCS_ERR_NO_MEMORY;
    status = ucp_init_version(API_MAJOR, API_MINOR, &params, NULL, &w->context);
    if (!status)
        status = ucp_worker_create(w->context, &worker_params, &w->worker);
    if (!status)
        status = ucp_worker_get_efd(w->worker, &w->event_fd);
    if (status)
        dkx_worker_close(w);
    else
        *out = w;
    return status;
}

int dkx_worker_address(dkx_worker *w, void *buffer, size_t *length)
{
    ucp_address_t *address;
    size_t size;
    int status = ucp_worker_get_address(w->worker, &address, &size);

    if (status)
        return status;
    status = copy_out(address, size, buffer, length);
    ucp_worker_release_address(w->worker, address);
    return status;
}

/* Over tcp nothing arrives unless the target progresses; a sleeping thread does it. A spinning one
 * would take the core that the trainer needs. When it has done all there was, it rings the bell. */
static void *progress_loop(void *arg)
{
    dkx_worker *w = arg;
    int news = 0;

    prctl(PR_SET_NAME, "ucx-progress");
    while (atomic_load(&w->running)) {
        if (ucp_worker_progress(w->worker)) {
            news = 1;
            continue;
        }
        if (news)
            ring_bell(w->bell);
        news = 0;
        if (ucp_worker_arm(w->worker) == UCS_OK) {
            struct pollfd event = {.fd = w->event_fd, .events = POLLIN};
            poll(&event, 1, POLL_MS);
        }
    }
    return NULL;
}

int dkx_progress_start(dkx_worker *w, uint32_t *bell)
{
    w->bell = bell;
    atomic_store(&w->running, 1);
    if (pthread_create(&w->thread, NULL, progress_loop, w) == 0)
        return 0;
    atomic_store(&w->running, 0);
    return DKX_THREAD;
}

void dkx_progress_stop(dkx_worker *w)
{
    if (!atomic_exchange(&w->running, 0))
        return;
    ucp_worker_signal(w->worker);
    pthread_join(w->thread, NULL);
}

/* ---- memory ---- */

int dkx_region_alloc(dkx_worker *w, size_t length, dkx_region **out)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = length,
        .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    dkx_region *r = calloc(1, sizeof *r);
    int status;

    if (!r)
        return UCS_ERR_NO_MEMORY;
    status = ucp_mem_map(w->context, &params, &r->handle);
    if (!status) {
        status = ucp_mem_query(r->handle, &attributes);
        if (status)
            ucp_mem_unmap(w->context, r->handle);
    }
    if (status) {
        free(r);
        return status;
    }
    r->address = attributes.address;
    *out = r;
    return 0;
}

void *dkx_region_address(const dkx_region *r) { return r->address; }

int dkx_region_key(dkx_worker *w, const dkx_region *r, void *buffer, size_t *length)
{
    void *key;
    size_t size;
    int status = ucp_rkey_pack(w->context, r->handle, &key, &size);

    if (status)
        return status;
    status = copy_out(key, size, buffer, length);
    ucp_rkey_buffer_release(key);
    return status;
}

int dkx_region_free(dkx_worker *w, dkx_region *r)
{
    int status = ucp_mem_unmap(w->context, r->handle);
    free(r);
    return status;
}

/* ---- peers ---- */

static void on_error(void *arg, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint;
    atomic_store(&((dkx_peer *)arg)->status, status);
}

int dkx_peer_open(dkx_worker *w, const void *address, dkx_peer **out)
{
    dkx_peer *p = calloc(1, sizeof *p);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_error, .arg = p}};
    int status;

    if (!p)
        return UCS_ERR_NO_MEMORY;
    p->worker = w;
    status = ucp_ep_create(w->worker, &params, &p->endpoint);
    if (status)
        free(p);
    else
        *out = p;
    return status;
}

int dkx_key_open(dkx_peer *p, const void *packed, ucp_rkey_h *out)
{
    return ucp_ep_rkey_unpack(p->endpoint, packed, out);
}

void dkx_key_close(ucp_rkey_h key) { ucp_rkey_destroy(key); }

static int wait_request(dkx_peer *p, void *request, int64_t timeout_ns)
{
    int64_t deadline = now_ns() + timeout_ns;
    ucs_status_t status;

    if (request == NULL)
        return 0;
    if (UCS_PTR_IS_ERR(request))
        return UCS_PTR_STATUS(request);
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS && now_ns() < deadline)
        if (!ucp_worker_progress(p->worker->worker))
            sched_yield(); /* the other side may need this core to answer */
    ucp_request_free(request);
    return status == UCS_INPROGRESS ? DKX_TIMEOUT : status;
}

static int put(dkx_peer *p, ucp_rkey_h key, const void *source, size_t length, uint64_t remote)
{
    ucp_request_param_t params = {0};
    void *request;

    if (length == 0)
        return 0;
    if (atomic_load(&p->status))
        return atomic_load(&p->status);
    request = ucp_put_nbx(p->endpoint, source, length, remote, key, &params);
    if (UCS_PTR_IS_ERR(request))
        return UCS_PTR_STATUS(request);
    if (request)
        ucp_request_free(request);
    return 0;
}

/* Waits until all is in the other side's memory, then rings the bell of the last write. */
int dkx_flush(dkx_peer *p, int64_t timeout_ns)
{
    ucp_request_param_t params = {0};
    int status = wait_request(p, ucp_ep_flush_nbx(p->endpoint, &params), timeout_ns);

    if (!status)
        status = atomic_load(&p->status);
    if (!status && p->bell)
        ring_bell(p->bell);
    return status;
}

/* Writes payload and header, then the word that announces them, and flushes; payload and header must
 * stay as they are until a flush has returned 0. One function for all: its caller in Python finds
 * the caches full of payload, so that every further call takes it 3 to 10 us, and 1 MiB takes 50. */
int dkx_write(dkx_peer *p, ucp_rkey_h key, const void *payload, size_t payload_length,
              uint64_t payload_remote, const void *header, size_t header_length,
              uint64_t header_remote, uint64_t word, uint64_t word_remote, uint64_t bell_remote,
              int64_t timeout_ns)
{
    void *bell = NULL;
    int status = put(p, key, payload, payload_length, payload_remote);

    if (!status)
        status = put(p, key, header, header_length, header_remote);
    if (!status)
        status = ucp_worker_fence(p->worker->worker);
    if (status)
        return status;
    p->word = word;
    p->bell = ucp_rkey_ptr(key, bell_remote, &bell) ? NULL : bell;
    status = put(p, key, &p->word, sizeof p->word, word_remote);
    return status ? status : dkx_flush(p, timeout_ns);
}

/* Closes and forgets the peer. `force` does not ask the other side: for a peer that may be dead. */
int dkx_peer_close(dkx_peer *p, int force, int64_t timeout_ns)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                  .flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0};
    int status = wait_request(p, ucp_ep_close_nbx(p->endpoint, &params), timeout_ns);

    /* Without these rounds a forced close over cma aborts when the worker is destroyed. */
    for (int idle = 0; idle < IDLE_ROUNDS; idle++)
        if (ucp_worker_progress(p->worker->worker))
            idle = 0;
    if (status != DKX_TIMEOUT) /* else UCX may still call on_error with it */
        free(p);
    return status;
}

/* Writes UCX's own description: of the connection, and of the protocols of its worker. */
int dkx_peer_describe(dkx_peer *p, char *buffer, size_t *length)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);
    int status;

    if (!stream)
        return UCS_ERR_NO_MEMORY;
    ucp_ep_print_info(p->endpoint, stream);
    ucp_worker_print_info(p->worker->worker, stream);
    fclose(stream);
    status = copy_out(text, size, buffer, length);
    free(text);
    return status;
}
