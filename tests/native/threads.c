/* Ranks as threads of one process, without Python: for processors that the tests reach by emulation alone. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "board.h"
#include "shared.h"

enum { MAX_RANKS = 3, OPERATIONS = 3000, RANK_BYTES = 1 << 16, LENGTH = 1500 };

void *(*copy_bytes)(void *to, const void *from, size_t num_bytes) = memmove;
PyThreadState *PyEval_SaveThread(void) { return NULL; }
void PyEval_RestoreThread(PyThreadState *state) { (void)state; }

static char *region;
static int num_ranks, is_crowded;

static void fail(const char *what, int64_t number) {
    printf("wrong: %s %lld\n", what, (long long)number);
    exit(1);
}

static void *run(void *argument) {
    uint64_t rank = (uint64_t)argument;
    struct waiter waiter = {is_crowded ? 0 : 50, is_crowded ? 1 : 10, 0, 16};
    struct board board = {.region = region, .rank_bytes = RANK_BYTES, .asleep = 64, .mark = {128, 256},
                          .result_mark = {384, 448}, .note = {512, 1024}, .result = {2048, 4096},
                          .small = {8192, 32768}, .rank = rank, .num_ranks = (uint64_t)num_ranks, .waiter = &waiter,
                          .result_bytes = is_crowded ? 2048 : 0};
    float values[LENGTH];
    for (uint64_t number = 1; number <= OPERATIONS; number++) {
        uint64_t count = number % 7 ? 3 : LENGTH;
        for (uint64_t i = 0; i < count; i++)
            values[i] = (float)(number + rank * 1000 + i);
        struct reduction reduction = {(char *)values, (char *)values, count * 4, 0, count, 4, 1, find_combine(SUM, F32)};
        int code = reduce(&board, number << 32 | 7, "note", 5, &reduction);
        while (code == WAITING)
            code = go_on(&board);
        for (uint64_t i = 0; i < count; i++)
            if (code != DONE || values[i] != (float)(num_ranks * (number + i) + 1000 * (num_ranks * (num_ranks - 1) / 2)))
                fail("all_reduce", (int64_t)number);
    }
    return NULL;
}

static void run_all(int ranks, int crowded) {
    pthread_t threads[MAX_RANKS];
    num_ranks = ranks;
    is_crowded = crowded;
    region = mmap(NULL, MAX_RANKS * RANK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, run, (void *)(uintptr_t)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    munmap(region, MAX_RANKS * RANK_BYTES);
}

/* 1.5 + 2.25 + 3 = 6.75 in every type that has halves; NaN stays one; integers wrap around. */
static void check_combine(void) {
    float f32[3][9];
    double f64[3][9];
    uint16_t bf16[3][9], f16[3][9];
    int32_t i32[3][9];
    int64_t i64[3][9];
    const uint16_t halves[2][3] = {{0x3fc0, 0x4010, 0x4040}, {0x3e00, 0x4080, 0x4200}};
    for (int rank = 0; rank < 3; rank++)
        for (int i = 0; i < 9; i++) {
            f32[rank][i] = 1.5f + 0.75f * (float)rank;
            f64[rank][i] = f32[rank][i];
            bf16[rank][i] = halves[0][rank];
            f16[rank][i] = halves[1][rank];
            i32[rank][i] = rank ? 1 : INT32_MAX;
            i64[rank][i] = rank ? 1 : INT64_MAX;
        }
    bf16[1][8] = 0x7fc0;
    f16[1][8] = 0x7e00;
    void *rows[NUM_DTYPES][3] = {{f32[0], f32[1], f32[2]}, {f64[0], f64[1], f64[2]}, {bf16[0], bf16[1], bf16[2]},
                                 {f16[0], f16[1], f16[2]}, {i32[0], i32[1], i32[2]}, {i64[0], i64[1], i64[2]}};
    for (int dtype = 0; dtype < NUM_DTYPES; dtype++) {
        combine_function sum = find_combine(SUM, dtype);
        if (!sum)
            fail("no sum of dtype", dtype);
        sum(rows[dtype][2], (const void *const *)rows[dtype], 3, 9);
    }
    for (int i = 0; i < 8; i++)
        if (f32[2][i] != 6.75f || f64[2][i] != 6.75 || bf16[2][i] != 0x40d8 || f16[2][i] != 0x46c0 ||
            i32[2][i] != INT32_MIN + 1 || i64[2][i] != INT64_MIN + 1)
            fail("sum", i);
    if ((bf16[2][8] & 0x7fff) <= 0x7f80 || (f16[2][8] & 0x7fff) <= 0x7c00)
        fail("NaN", 8);
}

int main(void) {
    check_combine();
    for (int ranks = 2; ranks <= MAX_RANKS; ranks++)
        for (int crowded = 0; crowded < 2; crowded++)
            run_all(ranks, crowded);
    printf("all right with pages of %ld bytes\n", sysconf(_SC_PAGESIZE));
    return 0;
}
