/*
 * Waiting for a word in memory; needs no UCX. Called by transport/memory.py through ctypes.
 */
#define _GNU_SOURCE
#include "common.h"

enum { DKM_TIMEOUT = -1 };
enum { MIN_NAP_NS = 500000, MAX_NAP_NS = 4000000 };

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/*
 * Waits until the word has the value, asleep until the bell rings. Not every writer can ring it
 * (over RDMA none can), so sleep comes in naps as long as the wait so far, within limits.
 */
int dkm_wait_word(const uint64_t *word, uint64_t value, uint32_t *bell, int64_t timeout_ns)
{
    int64_t start = now_ns();

    for (;;) {
        uint32_t heard = __atomic_load_n(bell, __ATOMIC_ACQUIRE); /* before the word is looked at */
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
            return 0;
        int64_t waited = now_ns() - start;
        if (waited >= timeout_ns)
            return DKM_TIMEOUT;
        int64_t nap = min(max(waited, MIN_NAP_NS), MAX_NAP_NS);
        struct timespec t = {0, min(nap, timeout_ns - waited)};
        syscall(SYS_futex, bell, FUTEX_WAIT, heard, &t, NULL, 0);
    }
}

void dkm_ring_bell(uint32_t *bell) { ring_bell(bell); }
