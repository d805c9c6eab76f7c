/*
 * What needs no UCX: waiting for a word in memory. Called by transport/memory.py through ctypes.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>

enum { DKM_TIMEOUT = -1 };

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void nap_ns(int64_t ns)
{
    struct timespec t = {ns / 1000000000LL, ns % 1000000000LL};
    nanosleep(&t, NULL);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until the word has the value: spins first, then naps of growing length. */
int dkm_wait_word(const uint64_t *word, uint64_t value, int64_t spin_ns, int64_t max_nap_ns,
                  int64_t timeout_ns)
{
    int64_t start = now_ns(), nap = 20000;

    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) {
        int64_t waited = now_ns() - start;
        if (waited >= timeout_ns)
            return DKM_TIMEOUT;
        if (waited < spin_ns) {
            relax();
            continue;
        }
        nap_ns(nap);
        nap = nap * 2 < max_nap_ns ? nap * 2 : max_nap_ns;
    }
    return 0;
}
