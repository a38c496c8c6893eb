/* Every access to memory that ranks share goes through the macros of this file.
 *
 * The shipped build makes them C11 atomics, copies and system calls. The build for tests (-DECHELON_EXPLORE) hands each
 * of them to a function of the test, which may let another rank go on there, and plays the C11 memory model: a load may
 * return any store that the rank need not have seen overwritten yet.
 *
 *   LOAD, STORE      a word, with its memory order
 *   FENCE            sequentially consistent
 *   GET, PUT         a copy out of shared memory, or into it
 *   READS, WRITES    announce that code which knows no shared memory reads or writes there
 *   SLEEP, WAKE      futex on the low half of a word; a sleep may end early without a reason
 *   RING             wake-up of a rank that sleeps on its files: eventfd
 *   PAUSE, YIELD     within a loop that waits
 *   LET_GO, TAKE     the interpreter's lock */

#ifndef ECHELON_SHARED_H
#define ECHELON_SHARED_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define RELAXED memory_order_relaxed
#define ACQUIRE memory_order_acquire
#define RELEASE memory_order_release

#ifdef ECHELON_EXPLORE

enum { LOADS, STORES, FENCES, READS_BYTES, WRITES_BYTES, SLEEPS, WAKES, YIELDS, RINGS };
extern uint64_t (*explore)(int what, uint64_t address, uint64_t value, int order);
void explored_copy(void *to, const void *from, size_t num_bytes);

#define LOAD(word, order) explore(LOADS, (uint64_t)(word), 0, (int)(order))
#define STORE(word, value, order) ((void)explore(STORES, (uint64_t)(word), (uint64_t)(value), (int)(order)))
#define FENCE() ((void)explore(FENCES, 0, 0, 0))
#define READS(from, num_bytes) ((void)explore(READS_BYTES, (uint64_t)(from), (uint64_t)(num_bytes), 0))
#define WRITES(to, num_bytes) ((void)explore(WRITES_BYTES, (uint64_t)(to), (uint64_t)(num_bytes), 0))
#define GET(to, from, num_bytes) (READS(from, num_bytes), explored_copy(to, from, num_bytes))
#define PUT(to, from, num_bytes) (WRITES(to, num_bytes), explored_copy(to, from, num_bytes))
#define SLEEP(word, value) ((void)explore(SLEEPS, (uint64_t)(word), (uint64_t)(value), 0))
#define WAKE(word) ((void)explore(WAKES, (uint64_t)(word), 0, 0))
#define RING(fd) ((void)explore(RINGS, (uint64_t)(fd), 0, 0))
#define PAUSE() ((void)0)
#define YIELD() ((void)explore(YIELDS, 0, 0, 0))
/* The functions of the test are Python. */
#define LET_GO() NULL
#define TAKE(state) ((void)(state))

#else

#include <sched.h>

#include "python.h"

void sleep_on(const uint64_t *word, uint64_t value);
void wake_all(const uint64_t *word);
void ring_eventfd(uint64_t fd);
/* memmove of the C library: a compiler may bring a memcpy of its own, which never writes past the caches. */
extern void *(*copy_bytes)(void *to, const void *from, size_t num_bytes);

#define LOAD(word, order) atomic_load_explicit((_Atomic uint64_t *)(word), order)
#define STORE(word, value, order) atomic_store_explicit((_Atomic uint64_t *)(word), value, order)
#define FENCE() atomic_thread_fence(memory_order_seq_cst)
#define READS(from, num_bytes) ((void)0)
#define WRITES(to, num_bytes) ((void)0)
#define GET(to, from, num_bytes) ((void)copy_bytes(to, from, num_bytes))
#define PUT(to, from, num_bytes) ((void)copy_bytes(to, from, num_bytes))
#define SLEEP(word, value) sleep_on(word, value)
#define WAKE(word) wake_all(word)
#define RING(fd) ring_eventfd(fd)
#define YIELD() ((void)sched_yield())
#define LET_GO() PyEval_SaveThread()
#define TAKE(state) PyEval_RestoreThread(state)
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("isb" ::: "memory")
#else
#define PAUSE() ((void)0)
#endif

#endif
#endif
