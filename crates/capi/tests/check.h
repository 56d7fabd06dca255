/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Shared by the C tests. */
#ifndef CHECK_H
#define CHECK_H

#include <dmafile.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what))                                                                               \
            broken(#what, __FILE__, __LINE__);                                                     \
    } while (0)

static inline void broken(const char *what, const char *file, int line)
{
    char why[512];

    dmafile_strerror_r(why, sizeof why);
    fprintf(stderr, "%s:%d: not so: %s; last failure: %s\n", file, line, what, why);
    exit(1);
}

/* Whether the message of the last failure contains this text. */
static inline int says(const char *part)
{
    char why[1024];
    int len = dmafile_strerror_r(why, sizeof why);

    return len == (int)strlen(why) && strstr(why, part) != NULL;
}

static inline int open_files(void)
{
    int fd, count = 0;

    for (fd = 0; fd < 256; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

#endif
