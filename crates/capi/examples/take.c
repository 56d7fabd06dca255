/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Takes files that another process holds in memory, without reading or copying, and prints them. C99.
 *
 *     cc -std=c99 take.c $(pkg-config --cflags --libs dmafile) -o take
 *
 *     ./take NAME [--socket SOCKET] [--wait MILLISECONDS] [--cat]
 *     ./take --shared PATH [--folder FOLDER] [--wait MILLISECONDS] [--cat]
 *
 * To see both sides: dmafile hold FILE --name NAME & ./take NAME --wait 60000
 */
#include <dmafile.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Prints the message of the last failure. */
static int fail(void)
{
    char why[1024];

    dmafile_strerror_r(why, sizeof why);
    fprintf(stderr, "take: %s\n", why);
    return 1;
}

/* Prints a line for each file, or with `cat` its bytes. */
static int look(const struct dmafile_held *held, int cat)
{
    static unsigned char chunk[1 << 16];
    size_t index, i;

    for (index = 0; index < dmafile_held_count(held); index++) {
        const struct dmafile_buffer *buffer = dmafile_held_buffer(held, index);
        uint64_t len = dmafile_buffer_len(buffer), at, sum = 0;
        const unsigned char *bytes = dmafile_buffer_data(buffer);

        /* Sealed memory, which cannot change, can be accessed directly; other memory is copied out. */
        for (at = 0; at < len; at += sizeof chunk) {
            size_t n = len - at < sizeof chunk ? (size_t)(len - at) : sizeof chunk;
            const unsigned char *from = bytes != NULL ? bytes + at : chunk;

            if (bytes == NULL && dmafile_buffer_read_at(buffer, at, chunk, n) < 0)
                return fail();
            if (cat && fwrite(from, 1, n, stdout) != n)
                return 1;
            for (i = 0; i < n; i++)
                sum += from[i];
        }
        if (!cat)
            printf("%s bytes %llu sum %llu\n", dmafile_held_name(held, index),
                   (unsigned long long)len, (unsigned long long)sum);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct dmafile_held *held;
    const char *name = NULL, *at = NULL, *wait = "0", *shared = NULL;
    int i, cat = 0, status;

    for (i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        const char **into = (strcmp(argv[i], "--socket") == 0 || strcmp(argv[i], "--folder") == 0) ? &at
                            : strcmp(argv[i], "--wait") == 0   ? &wait
                            : strcmp(argv[i], "--shared") == 0 ? &shared
                                                               : NULL;

        if (into != NULL && value != NULL) {
            *into = value;
            i++;
        } else if (strcmp(argv[i], "--cat") == 0) {
            cat = 1;
        } else if (name == NULL && argv[i][0] != '-') {
            name = argv[i];
        } else {
            name = shared = NULL;
            break;
        }
    }
    if ((name == NULL) == (shared == NULL)) {
        fprintf(stderr, "usage: take NAME [--socket SOCKET] [--wait MILLISECONDS] [--cat]\n"
                        "       take --shared PATH [--folder FOLDER] [--wait MILLISECONDS] [--cat]\n");
        return 2;
    }
    if (shared != NULL)
        status = dmafile_shared(&shared, 1, at, strtoull(wait, NULL, 10), NULL, &held);
    else
        status = dmafile_take(name, at, strtoull(wait, NULL, 10), NULL, &held);
    if (status < 0)
        return fail();
    status = look(held, cat);
    dmafile_held_free(held);
    return status;
}
