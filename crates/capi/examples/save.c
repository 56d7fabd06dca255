/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Saves memory of a program and memory behind a descriptor as one file, without copying them together
 * first; saves several descriptors as a snapshot, and loads it. C99.
 *
 *     cc -std=c99 save.c $(pkg-config --cflags --libs dmafile) -o save
 *
 *     ./save FILE HEADER 3<>MEMORY       the text HEADER, then all of descriptor 3
 *     ./save --snapshot FOLDER 3<>MEMORY 4<>MEMORY
 *     ./save --load FOLDER               what the snapshot has
 */
#define _POSIX_C_SOURCE 200809L

#include <dmafile.h>

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static struct dmafile_token *stop;

static void on_interrupt(int number)
{
    (void)number;
    dmafile_token_cancel(stop);
}

static void on_progress(uint64_t done, uint64_t total, void *user)
{
    (void)user;
    if (total > 0)
        fprintf(stderr, "\r%3u %%%s", (unsigned)(100 * done / total), done < total ? "" : "\n");
}

/* Prints the message of the last failure. */
static int fail(void)
{
    char why[1024];

    dmafile_strerror_r(why, sizeof why);
    fprintf(stderr, "save: %s\n", why);
    return 1;
}

static int save(const char *path, const char *header, const struct dmafile_save_options *options)
{
    struct dmafile_part parts[2] = { { 0 } };
    struct stat stat;
    int64_t bytes;

    if (fstat(3, &stat) < 0) {
        perror("save: descriptor 3");
        return 1;
    }
    parts[0].memory = header;
    parts[0].bytes = strlen(header);
    parts[1].fd = 3;
    parts[1].bytes = (uint64_t)stat.st_size;
    bytes = dmafile_save(parts, 2, path, options, NULL);
    if (bytes < 0)
        return fail();
    printf("%" PRId64 " bytes are on the disk\n", bytes);
    return 0;
}

static int save_snapshot(const char *folder, const struct dmafile_save_options *options)
{
    struct dmafile_source sources[2] = { { 0 } };
    int64_t bytes;

    sources[0].name = "weights";
    sources[0].fd = 3;
    sources[1].name = "cache";
    sources[1].fd = 4;
    bytes = dmafile_snapshot_save(sources, 2, folder, options, NULL);
    if (bytes < 0)
        return fail();
    printf("%" PRId64 " bytes of 2 sources are on the disk\n", bytes);
    return 0;
}

static int load_snapshot(const char *folder)
{
    struct dmafile_snapshot *snapshot;
    size_t i;

    if (dmafile_snapshot_load(folder, NULL, &snapshot) < 0)
        return fail();
    for (i = 0; i < dmafile_snapshot_count(snapshot); i++) {
        const struct dmafile_buffer *buffer = dmafile_snapshot_buffer(snapshot, i);

        printf("%s: %" PRIu64 " bytes, fd %d from %" PRIu64 "\n", dmafile_snapshot_name(snapshot, i),
               dmafile_buffer_len(buffer), dmafile_buffer_fd(buffer), dmafile_buffer_offset(buffer));
    }
    dmafile_snapshot_free(snapshot);
    return 0;
}

int main(int argc, char **argv)
{
    struct dmafile_save_options options = { 0 };
    int status;

    if (argc != 3) {
        fprintf(stderr, "usage: save FILE HEADER | save --snapshot FOLDER | save --load FOLDER\n");
        return 2;
    }
    stop = dmafile_token_new();
    if (!stop)
        return fail();
    signal(SIGINT, on_interrupt);
    options.size = sizeof options;
    options.verify = "sha256";
    options.progress = on_progress;
    options.cancel = stop;
    if (strcmp(argv[1], "--snapshot") == 0)
        status = save_snapshot(argv[2], &options);
    else if (strcmp(argv[1], "--load") == 0)
        status = load_snapshot(argv[2]);
    else
        status = save(argv[1], argv[2], &options);
    dmafile_token_free(stop);
    return status;
}
