/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Holds a file, takes it, and makes invalid requests. Run by install.rs, also under valgrind.
 *
 *     hold FILE SOCKET
 */
#define _GNU_SOURCE

#include <dmafile.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what))                                                                               \
            broken(#what, __LINE__);                                                               \
    } while (0)

static void broken(const char *what, int line)
{
    char why[512];

    dmafile_strerror_r(why, sizeof why);
    fprintf(stderr, "hold.c:%d: not so: %s; last failure: %s\n", line, what, why);
    exit(1);
}

static void progress(uint64_t done, uint64_t total, void *user)
{
    if (done == total)
        *(uint64_t *)user = total;
}

static void nulls(void)
{
    struct dmafile_held *held = (struct dmafile_held *)1;
    struct dmafile_holder *holder = (struct dmafile_holder *)1;
    const char *none = NULL;

    CHECK(dmafile_take(NULL, NULL, 0, NULL, &held) == -EINVAL && held == NULL);
    CHECK(dmafile_take("x", NULL, 0, NULL, NULL) == -EINVAL);
    CHECK(dmafile_take("a/b", NULL, 0, NULL, &held) == -EINVAL && held == NULL);
    CHECK(dmafile_shared(NULL, 1, NULL, 0, NULL, &held) == -EINVAL && held == NULL);
    CHECK(dmafile_shared(&none, 1, NULL, 0, NULL, &held) == -EINVAL && held == NULL);
    CHECK(dmafile_shared(NULL, 0, NULL, 0, NULL, &held) == -EINVAL && held == NULL);
    CHECK(dmafile_hold(&none, 1, "x", NULL, NULL, &holder) == -EINVAL && holder == NULL);
    CHECK(dmafile_hold_serving(NULL) == -EINVAL);
    errno = 0;
    CHECK(dmafile_held_count(NULL) == 0 && errno == EINVAL);
    CHECK(dmafile_held_name(NULL, 0) == NULL && dmafile_held_buffer(NULL, 0) == NULL);
    CHECK(dmafile_held_json(NULL) == NULL);
    dmafile_held_free(NULL);
    dmafile_hold_stop(NULL);
}

int main(int argc, char **argv)
{
    struct dmafile_options options = {0};
    struct dmafile_holder *holder, *other;
    struct dmafile_held *held;
    struct dmafile_token *token;
    const struct dmafile_buffer *buffer;
    const char *file;
    uint64_t told = 0;
    int child, status;

    CHECK(argc == 3);
    file = argv[1];
    nulls();

    options.size = sizeof options;
    options.offset = 1;
    CHECK(dmafile_hold(&file, 1, "x", argv[2], &options, &holder) == -EINVAL && holder == NULL);
    options.offset = 0;
    options.to = "anon";
    CHECK(dmafile_hold(&file, 1, "x", argv[2], &options, &holder) == -EINVAL && holder == NULL);
    options.to = "memfd";
    options.method = "threads";
    options.verify = "sha256";
    options.progress = progress;
    options.user = &told;
    CHECK(dmafile_hold(&file, 1, "x", argv[2], &options, &holder) == 0);
    CHECK(dmafile_hold_serving(holder) == 1);
    CHECK(dmafile_hold(&file, 1, "x", argv[2], NULL, &other) == -EADDRINUSE && other == NULL);

    CHECK(dmafile_take("other", argv[2], 0, NULL, &held) < 0 && held == NULL);
    CHECK(dmafile_take("x", argv[2], 0, NULL, &held) == 0);
    CHECK(dmafile_held_count(held) == 1);
    CHECK(strcmp(dmafile_held_name(held, 0), strrchr(file, '/') + 1) == 0);
    errno = 0;
    CHECK(dmafile_held_buffer(held, 1) == NULL && errno == ERANGE);
    CHECK(strstr(dmafile_held_json(held), "\"algorithm\":\"sha256\"") != NULL);
    buffer = dmafile_held_buffer(held, 0);
    CHECK(dmafile_buffer_len(buffer) == told);
    CHECK(dmafile_buffer_fd(buffer) >= 0 && dmafile_buffer_data(buffer) != NULL);
    CHECK(dmafile_buffer_report_json(buffer) == NULL && errno == ENODATA);

    /*
     * A forked child can still read, and its handles do nothing. It executes another program at its end, so that
     * valgrind does not report memory that belongs to threads of this program.
     */
    child = fork();
    if (child == 0) {
        const unsigned char *bytes = dmafile_buffer_data(buffer);
        unsigned char last;

        status = dmafile_buffer_read_at(buffer, told - 1, &last, 1) == 0 && last == bytes[told - 1];
        dmafile_held_free(held);
        dmafile_hold_stop(holder);
        execlp(status ? "true" : "false", "child", (char *)NULL);
        _exit(1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(dmafile_hold_serving(holder) == 1);

    /* Taken memory stays. */
    dmafile_hold_stop(holder);
    CHECK(dmafile_buffer_data(buffer) != NULL);
    dmafile_held_free(held);
    token = dmafile_token_new();
    dmafile_token_cancel(token);
    CHECK(dmafile_take("x", argv[2], UINT64_MAX, token, &held) == -ECANCELED && held == NULL);
    dmafile_token_free(token);
    return 0;
}
