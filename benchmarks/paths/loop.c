/*
 * The streams of the ring and memcpy as loops in C, as ucx_perftest has its own: what a caller in
 * Python adds is not in these figures. Compiled and called by loop.py; the functions of the
 * project's libraries come as pointers.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { LOOP_TIMEOUT = -2000, LOOP_DAMAGED = -2001 };
enum { SEQUENCE_OFFSET = 8, SPINS_BEFORE_YIELD = 10000 };

typedef int write_function(void *peer, void *key, const void *payload, size_t payload_length,
                           uint64_t payload_remote, const void *header, size_t header_length,
                           uint64_t header_remote, uint64_t word, uint64_t word_remote,
                           uint64_t bell_remote, int64_t timeout_ns);
typedef int wait_function(const uint64_t *word, uint64_t value, uint32_t *bell, int64_t timeout_ns);

struct place { /* of a slot: for the writer addresses on the other side */
    uint64_t payload, header, word, bell;
};

struct stream {
    const struct place *places;
    uint64_t num_slots, num_bytes;
    uint64_t first, num_messages; /* sequences: first, first + 1, ... */
    uint64_t touched;             /* write the source before each message, check the slot after it */
    uint64_t *released;           /* shared by both sides: the first sequence not yet given back */
    int64_t timeout_ns;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until every message before `sequence` was given back. */
static int await_released(const struct stream *s, uint64_t sequence)
{
    int64_t deadline = now_ns() + s->timeout_ns;

    for (long spins = 0; __atomic_load_n(s->released, __ATOMIC_ACQUIRE) < sequence; spins++) {
        if (spins < SPINS_BEFORE_YIELD) {
            relax();
        } else {
            sched_yield();
            if (now_ns() > deadline)
                return LOOP_TIMEOUT;
        }
    }
    return 0;
}

static void fill(uint64_t *words, uint64_t num_bytes, uint64_t value)
{
    for (uint64_t i = 0; i < num_bytes / sizeof *words; i++)
        words[i] = value;
}

static int holds(const uint64_t *words, uint64_t num_bytes, uint64_t value)
{
    uint64_t differing = 0;

    for (uint64_t i = 0; i < num_bytes / sizeof *words; i++)
        differing |= words[i] ^ value;
    return differing == 0;
}

int loop_send(const struct stream *s, write_function *write, void *peer, void *key,
              uint64_t *source, char *header, size_t header_length)
{
    uint64_t end = s->first + s->num_messages;

    for (uint64_t sequence = s->first; sequence < end; sequence++) {
        const struct place *to = &s->places[sequence % s->num_slots];
        int status = 0;
        if (sequence - s->first >= s->num_slots)
            status = await_released(s, sequence - s->num_slots + 1);
        if (status)
            return status;
        if (s->touched)
            fill(source, s->num_bytes, sequence);
        memcpy(header + SEQUENCE_OFFSET, &sequence, sizeof sequence);
        status = write(peer, key, source, s->num_bytes, to->payload, header, header_length,
                       to->header, sequence + 1, to->word, to->bell, s->timeout_ns);
        if (status)
            return status;
    }
    return await_released(s, end);
}

/* Looks at the doorbell for `spin_ns` before it sleeps. */
int loop_receive(const struct stream *s, wait_function *wait, int64_t spin_ns)
{
    uint64_t end = s->first + s->num_messages;

    for (uint64_t sequence = s->first; sequence < end; sequence++) {
        const struct place *at = &s->places[sequence % s->num_slots];
        const uint64_t *word = (const uint64_t *)at->word;
        int64_t spin_end = now_ns() + spin_ns;
        while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != sequence + 1 && now_ns() < spin_end)
            relax();
        if (wait(word, sequence + 1, (uint32_t *)at->bell, s->timeout_ns))
            return LOOP_TIMEOUT;
        if (!holds((const uint64_t *)(at->header + SEQUENCE_OFFSET), sizeof sequence, sequence))
            return LOOP_DAMAGED;
        if (s->touched && !holds((const uint64_t *)at->payload, s->num_bytes, sequence))
            return LOOP_DAMAGED;
        __atomic_store_n(s->released, sequence + 1, __ATOMIC_RELEASE);
    }
    return 0;
}

void loop_copy(void *const *targets, uint64_t num_targets, const void *source, uint64_t num_bytes,
               uint64_t num_copies)
{
    for (uint64_t i = 0; i < num_copies; i++)
        memcpy(targets[i % num_targets], source, num_bytes);
}
