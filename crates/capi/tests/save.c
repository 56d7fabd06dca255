/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Valid and invalid uses of saves and snapshots by a C program. Run by install.rs, also under
 * valgrind.
 *
 *     save FOLDER         every check, in an empty folder
 *     save --full FOLDER  saves several parts to a folder without room for any of them
 */
#define _GNU_SOURCE

#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BYTES ((size_t)3 << 20)

static unsigned char *bytes;
static char to[PATH_MAX];

static struct dmafile_save_options options(void)
{
    struct dmafile_save_options made;

    memset(&made, 0, sizeof made);
    made.size = sizeof made;
    return made;
}

/* A memfd with this many of the bytes. */
static int memory(size_t len)
{
    int fd = memfd_create("memory", MFD_CLOEXEC);

    CHECK(fd >= 0 && write(fd, bytes, len) == (ssize_t)len);
    return fd;
}

/* Whether a file has exactly these bytes. */
static int holds(const char *path, const void *expected, size_t len)
{
    unsigned char *found = malloc(len + 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC), same;

    same = fd >= 0 && read(fd, found, len + 1) == (ssize_t)len && memcmp(found, expected, len) == 0;
    close(fd);
    free(found);
    return same;
}

static int files(const char *folder)
{
    DIR *open_folder = opendir(folder);
    int count = 0;

    while (readdir(open_folder))
        count++;
    closedir(open_folder);
    /* Without "." and "..". */
    return count - 2;
}

/* Describes the bytes as three parts. */
static void in_parts(struct dmafile_part parts[3], int fd)
{
    memset(parts, 0, 3 * sizeof *parts);
    parts[0].memory = bytes;
    parts[0].bytes = 100;
    parts[1].fd = fd;
    parts[1].offset = 100;
    parts[1].bytes = 1000000;
    parts[2].memory = bytes + 1000100;
    parts[2].bytes = BYTES - 1000100;
}

static void parts(void)
{
    static const char *methods[] = { NULL, "auto", "uring", "threads", "bounce" };
    struct dmafile_save_options how = options();
    struct dmafile_part parts[3];
    char *report = to;
    size_t i;
    int fd = memory(BYTES);

    in_parts(parts, fd);
    for (i = 0; i < sizeof methods / sizeof *methods; i++) {
        how.method = methods[i];
        how.verify = "sha256";
        how.block = i == 2 ? 65536 : 0;
        how.queue_depth = i == 2 ? 3 : 0;
        CHECK(dmafile_save(parts, 3, to, &how, &report) == (int64_t)BYTES);
        CHECK(holds(to, bytes, BYTES));
        CHECK(strstr(report, "\"atomic\":true") != NULL && strstr(report, "\"sync\":true") != NULL);
        dmafile_report_free(report);
        CHECK(unlink(to) == 0);
    }
    how = options();
    how.io = "buffered";
    how.flags = DMAFILE_SAVE_NO_SYNC;
    CHECK(dmafile_save(parts, 3, to, &how, &report) == (int64_t)BYTES);
    CHECK(strstr(report, "\"io\":\"buffered\"") && strstr(report, "\"sync\":false"));
    dmafile_report_free(report);
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == (int64_t)BYTES && holds(to, bytes, BYTES));
    /* No parts make an empty file. */
    CHECK(dmafile_save(NULL, 0, to, NULL, NULL) == 0 && holds(to, "", 0));
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == (int64_t)BYTES && files(".") == 1);
    close(fd);
}

static void in_place(void)
{
    struct dmafile_save_options how = options();
    struct dmafile_part part = { 0 };
    unsigned char *expected = malloc(BYTES);
    int fd = memory(BYTES);

    part.fd = fd;
    part.offset = 100;
    part.bytes = 4000;
    how.flags = DMAFILE_SAVE_IN_PLACE;
    how.offset = 5000;
    CHECK(dmafile_save(&part, 1, to, &how, NULL) == 4000);
    memcpy(expected, bytes, BYTES);
    memcpy(expected + 5000, bytes + 100, 4000);
    CHECK(holds(to, expected, BYTES));
    how.offset = 0;
    CHECK(dmafile_save(&part, 1, to, &how, NULL) == 4000);
    memcpy(expected, bytes + 100, 4000);
    CHECK(holds(to, expected, BYTES));
    how.flags = 0;
    how.offset = 1;
    CHECK(dmafile_save(&part, 1, to, &how, NULL) == -EINVAL && says("DMAFILE_SAVE_IN_PLACE"));
    CHECK(holds(to, expected, BYTES));
    free(expected);
    close(fd);
}

static void pipes(void)
{
    struct dmafile_part part = { 0 };
    int ends[2];

    CHECK(pipe(ends) == 0 && write(ends[1], bytes, 5000) == 5000);
    close(ends[1]);
    part.fd = ends[0];
    part.bytes = UINT64_MAX;
    CHECK(dmafile_save(&part, 1, to, NULL, NULL) == 5000 && holds(to, bytes, 5000));
    close(ends[0]);
    CHECK(pipe(ends) == 0 && write(ends[1], bytes, 5000) == 5000);
    close(ends[1]);
    part.fd = ends[0];
    part.bytes = 5001;
    CHECK(dmafile_save(&part, 1, to, NULL, NULL) == -ENODATA && holds(to, bytes, 5000));
    close(ends[0]);
}

static void refusals(void)
{
    struct { struct dmafile_save_options known; long more; } newer;
    struct dmafile_save_options how = options();
    struct dmafile_part parts[3];
    char *report = to;
    int fd = memory(BYTES), ends[2];

    in_parts(parts, fd);
    CHECK(dmafile_save(NULL, 1, to, NULL, &report) == -EINVAL && says("parts: it is NULL"));
    CHECK(report == NULL);
    CHECK(dmafile_save(parts, 3, NULL, NULL, NULL) == -EINVAL && says("path"));
    how.verify = "crc32c=00000000";
    report = to;
    CHECK(dmafile_save(parts, 3, to, &how, &report) == -EBADMSG && says("wrong digest"));
    CHECK(report == NULL);
    how.verify = "md5";
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("md5"));
    how = options();
    how.method = "heap-read";
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("heap-read is a load method"));
    how = options();
    how.block = 1;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("block: 1 is out of range"));
    how = options();
    how.queue_depth = 5000;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("queue_depth"));
    how = options();
    how.flags = 4;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("options.flags"));
    how = options();
    how.io = "\xff";
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("UTF-8"));

    how = options();
    how.size = 8;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("dmafile_save_options"));
    how.size = 0;
    how.block = 4096;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -EINVAL && says("options.size"));
    how.size = 5000;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -E2BIG);
    memset(&newer, 0, sizeof newer);
    newer.known.size = sizeof newer;
    newer.more = 1;
    CHECK(dmafile_save(parts, 3, to, &newer.known, NULL) == -E2BIG && says("does not know"));

    parts[1].fd = INT_MAX;
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == -EBADF && says("fd:2147483647"));
    parts[1].fd = -1;
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == -EBADF);
    parts[1].fd = fd;
    parts[1].offset = BYTES;
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == -EINVAL && says("past the end"));
    CHECK(pipe(ends) == 0);
    parts[1].fd = ends[0];
    parts[1].offset = 0;
    CHECK(dmafile_save(parts, 3, to, NULL, NULL) == -ESPIPE);
    close(ends[0]);
    close(ends[1]);
    in_parts(parts, fd);
    CHECK(dmafile_save(parts, 3, "/", NULL, NULL) == -EISDIR);
    CHECK(dmafile_save(parts, 3, "missing/to", NULL, NULL) == -ENOENT);
    dmafile_report_free(NULL);
    CHECK(holds(to, bytes, 5000) && files(".") == 1);
    close(fd);
}

struct told {
    uint64_t calls, done, total;
    struct dmafile_token *cancels;
};

static void tell(uint64_t done, uint64_t total, void *user)
{
    struct told *told = user;

    CHECK(done >= told->done && done <= total);
    told->calls++;
    told->done = done;
    told->total = total;
    if (told->cancels)
        dmafile_token_cancel(told->cancels);
}

static void progress_and_cancel(void)
{
    struct dmafile_token *token = dmafile_token_new();
    struct dmafile_save_options how = options();
    struct told told = { 0 };
    struct dmafile_part parts[3];
    int fd = memory(BYTES);

    in_parts(parts, fd);
    how.progress = tell;
    how.user = &told;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == (int64_t)BYTES);
    CHECK(told.calls > 0 && told.done == BYTES && told.total == BYTES);
    CHECK(dmafile_save(parts, 1, to, NULL, NULL) == 100);
    CHECK(dmafile_token_cancel(token) == 0);
    how.cancel = token;
    CHECK(dmafile_save(parts, 3, to, &how, NULL) == -ECANCELED);
    CHECK(holds(to, bytes, 100) && files(".") == 1);
    dmafile_token_free(token);
    close(fd);
}

static struct dmafile_source source(const char *name, int fd, uint64_t offset, uint64_t len)
{
    struct dmafile_source made = { 0 };

    made.name = name;
    made.fd = fd;
    made.offset = offset;
    made.bytes = len;
    return made;
}

static int same(const struct dmafile_buffer *buffer, const unsigned char *expected, size_t len)
{
    unsigned char *found = malloc(len + 1);
    int equal = dmafile_buffer_len(buffer) == len &&
                dmafile_buffer_read_at(buffer, 0, found, len) == 0 && memcmp(found, expected, len) == 0;

    free(found);
    return equal;
}

static void snapshots(void)
{
    struct dmafile_options load;
    struct dmafile_save_options how = options();
    struct dmafile_snapshot *snapshot = (void *)&how;
    struct dmafile_source sources[3];
    struct dmafile_buffer *kept;
    struct told told = { 0 };
    const char *file = "snapshot/part.1.dmafile";
    char *report = to;
    int fd = memory(BYTES), empty = memory(0), damaged;

    memset(&load, 0, sizeof load);
    load.size = sizeof load;
    sources[0] = source("all", fd, 0, 0);
    sources[1] = source("part", fd, 4096, 5000);
    sources[2] = source("empty", empty, 0, 0);
    CHECK(mkdir("snapshot", 0700) == 0);
    CHECK(dmafile_snapshot_load("snapshot", NULL, &snapshot) == -ENOENT && snapshot == NULL);
    how.progress = tell;
    how.user = &told;
    how.verify = "sha256";
    how.method = "threads";
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", &how, &report) == (int64_t)BYTES + 5000);
    CHECK(strstr(report, "\"generation\":1") && strstr(report, "\"algorithm\":\"sha256\""));
    CHECK(strstr(report, "\"method\":\"threads\"") != NULL);
    dmafile_report_free(report);
    CHECK(told.done == BYTES + 5000 && told.total == told.done);
    CHECK(holds(file, bytes + 4096, 5000) && files("snapshot") == 4);

    memset(&told, 0, sizeof told);
    load.progress = tell;
    load.user = &told;
    load.to = "memfd";
    CHECK(dmafile_snapshot_load("snapshot", &load, &snapshot) == 0);
    CHECK(told.done == BYTES + 5000);
    CHECK(dmafile_snapshot_count(snapshot) == 3);
    CHECK(strcmp(dmafile_snapshot_name(snapshot, 0), "all") == 0);
    CHECK(strcmp(dmafile_snapshot_name(snapshot, 2), "empty") == 0);
    CHECK(same(dmafile_snapshot_buffer(snapshot, 0), bytes, BYTES));
    CHECK(same(dmafile_snapshot_buffer(snapshot, 1), bytes + 4096, 5000));
    CHECK(dmafile_buffer_len(dmafile_snapshot_buffer(snapshot, 2)) == 0);
    CHECK(dmafile_buffer_fd(dmafile_snapshot_buffer(snapshot, 2)) >= 0);
    CHECK(strstr(dmafile_snapshot_report_json(snapshot), "\"generation\":1") != NULL);
    CHECK(strstr(dmafile_buffer_report_json(dmafile_snapshot_buffer(snapshot, 1)), "\"bytes\":5000"));
    CHECK(dmafile_buffer_report_json(dmafile_snapshot_buffer(snapshot, 2)) == NULL);
    CHECK(dmafile_snapshot_name(snapshot, 3) == NULL && errno == ERANGE);
    CHECK(dmafile_snapshot_buffer(snapshot, SIZE_MAX) == NULL && errno == ERANGE);
    CHECK(dmafile_snapshot_take(snapshot, 3) == NULL && errno == ERANGE);
    kept = dmafile_snapshot_take(snapshot, 1);
    CHECK(kept != NULL && dmafile_snapshot_take(snapshot, 1) == NULL && errno == ENODATA);
    CHECK(dmafile_snapshot_buffer(snapshot, 1) == NULL && says("taken"));
    dmafile_snapshot_free(snapshot);
    CHECK(same(kept, bytes + 4096, 5000));
    dmafile_buffer_free(kept);

    /* Refused saves do not change the snapshot. */
    how = options();
    how.flags = DMAFILE_SAVE_IN_PLACE;
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", &how, &report) == -EINVAL && report == NULL);
    how.flags = 0;
    how.verify = "crc32c=00000000";
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", &how, NULL) == -EINVAL && says("=HEX"));
    how = options();
    how.block = 1;
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", &how, NULL) == -EINVAL && says("block"));
    CHECK(dmafile_snapshot_save(sources, 0, "snapshot", NULL, NULL) == -EINVAL && says("sources: "));
    CHECK(dmafile_snapshot_save(NULL, 1, "snapshot", NULL, NULL) == -EINVAL);
    CHECK(dmafile_snapshot_save(sources, 3, NULL, NULL, NULL) == -EINVAL);
    CHECK(dmafile_snapshot_save(sources, 3, "missing", NULL, NULL) == -ENOENT);
    sources[1].name = "all";
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", NULL, NULL) == -EINVAL && says("twice"));
    sources[1].name = NULL;
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", NULL, NULL) == -EINVAL);
    sources[1] = source("part", -1, 0, 0);
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", NULL, NULL) == -EBADF);
    sources[1] = source("part", fd, BYTES - 1, 2);
    CHECK(dmafile_snapshot_save(sources, 3, "snapshot", NULL, NULL) == -EINVAL);
    load.verify = "crc32c";
    CHECK(dmafile_snapshot_load("snapshot", &load, &snapshot) == -EINVAL && says("options.verify"));
    load.verify = NULL;
    load.offset = 1;
    CHECK(dmafile_snapshot_load("snapshot", &load, &snapshot) == -EINVAL && says("whole"));
    load.offset = 0;
    load.method = "nothing like it";
    CHECK(dmafile_snapshot_load("snapshot", &load, &snapshot) == -EINVAL);
    CHECK(dmafile_snapshot_load("snapshot", NULL, NULL) == -EINVAL);
    CHECK(dmafile_snapshot_load(NULL, NULL, &snapshot) == -EINVAL);
    CHECK(dmafile_snapshot_count(NULL) == 0 && errno == EINVAL);
    CHECK(dmafile_snapshot_name(NULL, 0) == NULL && dmafile_snapshot_buffer(NULL, 0) == NULL);
    CHECK(dmafile_snapshot_take(NULL, 0) == NULL && dmafile_snapshot_report_json(NULL) == NULL);
    dmafile_snapshot_free(NULL);
    CHECK(dmafile_snapshot_load("snapshot", NULL, &snapshot) == 0);
    CHECK(same(dmafile_snapshot_buffer(snapshot, 0), bytes, BYTES));
    dmafile_snapshot_free(snapshot);

    damaged = open(file, O_WRONLY | O_CLOEXEC);
    CHECK(damaged >= 0 && pwrite(damaged, "damage", 6, 1000) == 6);
    close(damaged);
    CHECK(dmafile_snapshot_load("snapshot", NULL, &snapshot) == -EBADMSG && snapshot == NULL);
    CHECK(says("part.1.dmafile"));
    close(fd);
    close(empty);
}

/* TO exists, and there is no room for a second file. */
static void full(void)
{
    struct dmafile_part parts[3];
    char *report = to;
    int fd = memory(BYTES);

    in_parts(parts, fd);
    CHECK(dmafile_save(parts, 1, to, NULL, NULL) == 100);
    CHECK(dmafile_save(parts, 3, to, NULL, &report) == -ENOSPC && report == NULL);
    CHECK(says("No space left on device (ENOSPC); free space"));
    CHECK(holds(to, bytes, 100) && files(".") == 1);
    close(fd);
}

int main(int argc, char **argv)
{
    int before = open_files();
    uint64_t state = 88172645463325252ULL;
    size_t i;

    CHECK(argc >= 2 && chdir(argv[argc - 1]) == 0 && getcwd(to, sizeof to - 3) != NULL);
    strcat(to, "/to");
    bytes = malloc(BYTES);
    for (i = 0; i < BYTES; i += sizeof state) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(bytes + i, &state, sizeof state);
    }
    if (argc == 3) {
        full();
    } else {
        parts();
        in_place();
        pipes();
        refusals();
        progress_and_cancel();
        snapshots();
    }
    free(bytes);
    CHECK(open_files() == before);
    return 0;
}
