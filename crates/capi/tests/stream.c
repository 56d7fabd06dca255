/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Streams a file through a ring, and makes invalid requests. Run by install.rs, also under valgrind.
 *
 *     stream cat FILE      writes its bytes to the standard output
 *     stream checks FILE   without a GPU driver
 *     stream device FILE LAST   twice, pinned for two devices: cuda:0 and LAST, which may be the same
 */
#include "check.h"

#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

static const uint64_t RING = 1 << 18;

static struct dmafile_options small(void)
{
    struct dmafile_options how = {0};

    how.size = sizeof how;
    how.block = 16 << 10;
    return how;
}

/* Keeps one slot while it takes the next, as a program that copies does. */
static void cat(const char *file)
{
    struct dmafile_options how = small();
    struct dmafile_piece last = {0}, piece;
    struct dmafile_stream *stream;
    uint64_t upto = 0;
    int got;

    CHECK(dmafile_stream_open(file, &how, NULL, RING, 8, &stream) == 0);
    while ((got = dmafile_stream_next(stream, &piece)) == 1) {
        CHECK(piece.at == upto && fwrite(piece.data, 1, piece.bytes, stdout) == piece.bytes);
        upto += piece.bytes;
        if (last.bytes)
            CHECK(dmafile_stream_done(stream, last.slot) == 0);
        last = piece;
    }
    CHECK(got == -EBUSY && says("slots are still out: 1"));
    CHECK(dmafile_stream_done(stream, last.slot) == 0);
    CHECK(dmafile_stream_next(stream, &piece) == 0 && dmafile_stream_next(stream, &piece) == 0);
    CHECK(dmafile_stream_done(stream, last.slot) == -EINVAL && says("is not out"));
    dmafile_stream_close(stream);
}

/* Holds as many slots as allowed, of a file with fewer slots than the ring. */
static void hold(const char *file)
{
    struct dmafile_options how = small();
    struct dmafile_stream *stream;
    struct dmafile_piece piece;
    uint64_t slot;

    how.length = RING / 2;
    CHECK(dmafile_stream_open(file, &how, NULL, RING, 8, &stream) == 0);
    /* It takes this long only if it waits for a slot that is held. */
    alarm(60);
    for (slot = 0; slot < 4; slot++)
        CHECK(dmafile_stream_next(stream, &piece) == 1 && piece.slot == slot);
    alarm(0);
    for (slot = 0; slot < 4; slot++)
        CHECK(dmafile_stream_done(stream, slot) == 0);
    CHECK(dmafile_stream_next(stream, &piece) == 0);
    dmafile_stream_close(stream);
}

/* Exit handlers of a child close what the parent has. */
static void forked(const char *file)
{
    struct dmafile_options how = small();
    struct dmafile_stream *stream;
    struct dmafile_piece piece;
    int status;
    pid_t child;

    CHECK(dmafile_stream_open(file, &how, NULL, RING, 8, &stream) == 0);
    CHECK(dmafile_stream_next(stream, &piece) == 1);
    child = fork();
    if (child == 0) {
        alarm(60);
        CHECK(dmafile_stream_next(stream, &piece) == -EINVAL && says("forked"));
        CHECK(dmafile_stream_done(stream, piece.slot) == -EINVAL);
        dmafile_stream_close(stream);
        execlp("true", "true", (char *)NULL);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(dmafile_stream_done(stream, piece.slot) == 0);
    dmafile_stream_close(stream);
}

/* The whole stream. */
static int through(const char *file, const struct dmafile_options *how, const char *device)
{
    struct dmafile_stream *stream;
    struct dmafile_piece piece;
    int got;

    CHECK(dmafile_stream_open(file, how, device, RING, 4, &stream) == 0);
    while ((got = dmafile_stream_next(stream, &piece)) == 1)
        CHECK(dmafile_stream_done(stream, piece.slot) == 0);
    CHECK(dmafile_stream_next(stream, &piece) == got);
    dmafile_stream_close(stream);
    return got;
}

static void checks(const char *file)
{
    struct dmafile_options how = small();
    struct dmafile_token *token = dmafile_token_new();
    struct dmafile_buffer *buffer;
    struct dmafile_stream *stream = (struct dmafile_stream *)&how;
    struct dmafile_piece piece;
    int count;

    CHECK(dmafile_stream_open(NULL, &how, NULL, 0, 0, &stream) == -EINVAL && stream == NULL);
    CHECK(dmafile_stream_open(file, &how, NULL, 0, 0, NULL) == -EINVAL);
    CHECK(dmafile_stream_open(file, &how, "gpu", 0, 0, &stream) == -EINVAL);
    CHECK(says("'gpu' is neither cuda:N nor hip:N"));
    CHECK(dmafile_stream_open(file, &how, NULL, 0, 1, &stream) == -EINVAL && says("ring: "));
    CHECK(dmafile_stream_open(file, &how, NULL, 100, 0, &stream) == -EINVAL && says("ring: "));
    how.to = "anon";
    CHECK(dmafile_stream_open(file, &how, NULL, 0, 0, &stream) == -EINVAL && says("options.to"));
    CHECK(dmafile_stream_next(NULL, &piece) == -EINVAL && dmafile_stream_done(NULL, 0) == -EINVAL);
    dmafile_stream_close(NULL);

    hold(file);
    forked(file);
    how = small();
    CHECK(through(file, &how, NULL) == 0 && through(file, NULL, NULL) == 0);
    CHECK(through("/no/such/file", &how, NULL) == -ENOENT);
    how.verify = "crc32c=00000000";
    CHECK(through(file, &how, NULL) == -EBADMSG && says("wrong digest"));
    how.verify = "crc32c";
    CHECK(through(file, &how, NULL) == 0);
    how = small();
    how.cancel = token;
    dmafile_token_cancel(token);
    CHECK(through(file, &how, NULL) == -ECANCELED);
    dmafile_token_free(token);

    /* Closed early: before the first slot is taken, and while slots are taken. */
    how = small();
    for (count = 0; count < 3; count++) {
        int left = count;

        CHECK(dmafile_stream_open(file, &how, NULL, RING, 8, &stream) == 0);
        while (left--)
            CHECK(dmafile_stream_next(stream, &piece) == 1);
        dmafile_stream_close(stream);
    }

    CHECK(dmafile_load(file, NULL, &buffer) == 0);
    CHECK(dmafile_buffer_pin(NULL, "cuda:0") == -EINVAL && dmafile_buffer_unpin(NULL) == -EINVAL);
    CHECK(dmafile_buffer_pin(buffer, NULL) == -EINVAL && dmafile_buffer_unpin(buffer) == 0);
    CHECK(dmafile_buffer_pin(buffer, "cpu") == -EINVAL);
    dmafile_buffer_free(buffer);
}

static void device(const char *file, const char *last)
{
    struct dmafile_options how = small();
    struct dmafile_buffer *buffer;

    CHECK(through(file, &how, last) == 0);
    CHECK(through(file, &how, "cuda:9") == -ENODEV);
    CHECK(dmafile_load(file, NULL, &buffer) == 0);
    CHECK(dmafile_buffer_pin(buffer, "cuda:0") == 0);
    CHECK(dmafile_buffer_pin(buffer, "cuda:0") == -EBUSY);
    CHECK(dmafile_buffer_seal(buffer) == -EBUSY && says("pinned for cuda:0"));
    CHECK(dmafile_buffer_unpin(buffer) == 0 && dmafile_buffer_pin(buffer, last) == 0);
    dmafile_buffer_free(buffer);
    how = small();
    how.block = 0;
    how.to = "cuda-host";
    CHECK(dmafile_load(file, &how, &buffer) == 0);
    CHECK(dmafile_buffer_fd(buffer) >= 0 && dmafile_buffer_pin(buffer, "cuda:0") == -EBUSY);
    dmafile_buffer_free(buffer);
}

int main(int argc, char **argv)
{
    int files;

    if (argc < 3)
        return 2;
    /* A driver keeps descriptors open. */
    if (argc == 4)
        device(argv[2], argv[3]);
    files = open_files();
    if (strcmp(argv[1], "cat") == 0)
        cat(argv[2]);
    else if (strcmp(argv[1], "checks") == 0)
        checks(argv[2]);
    else if (argc == 4)
        device(argv[2], argv[3]);
    else
        return 2;
    CHECK(open_files() == files);
    return 0;
}
