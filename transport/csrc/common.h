/* What both libraries need: the clock, and the bell that ends a wait. */
#ifndef DISAGGKD_COMMON_H
#define DISAGGKD_COMMON_H

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Ends the naps of those who wait beside this word, in this process or another one of the host. */
static inline void ring_bell(uint32_t *bell)
{
    __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

#endif
