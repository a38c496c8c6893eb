/* The process that is a slow link: moves packets between two TUN devices until standard input ends.
 *
 *     slow_link FIRST SECOND SECONDS_PER_BYTE DELAY
 *
 * FIRST and SECOND are file descriptors of devices whose packets begin with 10 bytes for a network card. Compiled by
 * slow_link.py: the same in Python took twice the processor time, of the processors that the ranks compute on.
 */

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Bytes before each packet that say what a network card would still do to it: sums and cutting. */
#define HEADER 10
#define LARGEST (HEADER + 65536)
/* Seconds that a packet may wait for those before it. */
#define LONGEST_QUEUE 0.05
/* Seconds from one look at packets under way to the next. A card, too, tells of several at once; to be woken for each
 * took half as long again. */
#define LOOK 250e-6
#define MOST_PACKETS 65536

struct packet {
    double due;
    size_t size;
    char *bytes;
};

/* What is on its way from one device to the other. */
struct way {
    int source, target;
    double free_at;
    struct packet *packets;
    /* How many have gone in and come out. */
    unsigned taken, given;
};

static double seconds_per_byte, delay;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Takes all packets that the source has, as if they had come so many seconds ago. */
static void take(struct way *way, double ago) {
    static char bytes[LARGEST];
    ssize_t size;
    while ((size = read(way->source, bytes, sizeof bytes)) > 0) {
        double came = now() - ago, begins = came > way->free_at ? came : way->free_at;
        if (begins - came > LONGEST_QUEUE || way->taken - way->given == MOST_PACKETS) continue;
        struct packet *packet = &way->packets[way->taken++ % MOST_PACKETS];
        way->free_at = begins + (size - HEADER) * seconds_per_byte;
        packet->due = way->free_at + delay;
        packet->size = size;
        packet->bytes = malloc(size);
        if (!packet->bytes) fail("malloc");
        memcpy(packet->bytes, bytes, size);
    }
    if (size == 0 || errno != EAGAIN) fail("read");
}

/* Puts what is due, give or take half a look, into the target. */
static void deliver(struct way *way) {
    double until = now() + LOOK / 2;
    while (way->taken != way->given && way->packets[way->given % MOST_PACKETS].due <= until) {
        struct packet *packet = &way->packets[way->given++ % MOST_PACKETS];
        if (write(way->target, packet->bytes, packet->size) < 0) fail("write");
        free(packet->bytes);
    }
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    int first = atoi(arguments[1]), second = atoi(arguments[2]);
    seconds_per_byte = atof(arguments[3]);
    delay = atof(arguments[4]);
    /* Without the right to it: on time as far as other processes let it. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    struct way ways[] = {{.source = first, .target = second}, {.source = second, .target = first}};
    for (int i = 0; i < 2; i++) {
        ways[i].packets = calloc(MOST_PACKETS, sizeof *ways[i].packets);
        if (!ways[i].packets) fail("calloc");
    }
    for (;;) {
        double ago = 0;
        if (ways[0].taken != ways[0].given || ways[1].taken != ways[1].given) {
            nanosleep(&(struct timespec){.tv_nsec = (long)(LOOK * 1e9)}, NULL);
            ago = LOOK / 2;
        } else {
            struct pollfd sources[] = {{first, POLLIN, 0}, {second, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
            if (poll(sources, 3, -1) < 0) fail("poll");
            if (sources[2].revents) return 0;
        }
        for (int i = 0; i < 2; i++) {
            take(&ways[i], ago);
            deliver(&ways[i]);
        }
    }
}
