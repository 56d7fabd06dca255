/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Valid and invalid uses of a recorder by a C program. Run by install.rs, also under valgrind.
 *
 *     record FILE       records 21 buffers of a memfd and of memory, and reads them
 */
#define _GNU_SOURCE

#include "check.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define FRAME 100000

static struct dmafile_recorder_options options(void)
{
    struct dmafile_recorder_options made;

    memset(&made, 0, sizeof made);
    made.size = sizeof made;
    return made;
}

static void refused(const char *path)
{
    struct dmafile_recorder_options how = options();
    struct dmafile_recorder_buffer *buffer = (void *)&how;
    struct dmafile_recorder *recorder = (void *)&how;
    struct { struct dmafile_recorder_options known; long more; } newer;
    int ends[2];

    CHECK(dmafile_recorder_new(NULL, NULL, &recorder) == -EINVAL && recorder == NULL);
    CHECK(dmafile_recorder_new(path, NULL, NULL) == -EINVAL);
    how.in_flight = 65;
    CHECK(dmafile_recorder_new(path, &how, &recorder) == -EINVAL);
    how = options();
    how.flags = 8;
    CHECK(dmafile_recorder_new(path, &how, &recorder) == -EINVAL);
    how = options();
    how.method = "nothing like it";
    CHECK(dmafile_recorder_new(path, &how, &recorder) == -EINVAL);
    how = options();
    how.size = 8;
    CHECK(dmafile_recorder_new(path, &how, &recorder) == -EINVAL);
    how.size = 5000;
    CHECK(dmafile_recorder_new(path, &how, &recorder) == -E2BIG);
    memset(&newer, 0, sizeof newer);
    newer.known.size = sizeof newer;
    newer.more = 1;
    CHECK(dmafile_recorder_new(path, &newer.known, &recorder) == -E2BIG);
    CHECK(access(path, F_OK) != 0);

    CHECK(dmafile_recorder_attach(-1, &buffer) == -EBADF && buffer == NULL);
    CHECK(dmafile_recorder_attach(INT_MAX, &buffer) == -EBADF);
    CHECK(dmafile_recorder_attach(0, NULL) == -EINVAL);
    CHECK(pipe(ends) == 0);
    CHECK(dmafile_recorder_attach(ends[0], &buffer) == -EINVAL);
    close(ends[0]);
    close(ends[1]);
    CHECK(dmafile_recorder_append(NULL, NULL, 0, 0, 0, 0) == -EINVAL);
    CHECK(dmafile_recorder_wait(NULL, 0, 0) == -EINVAL);
    CHECK(dmafile_recorder_sync(NULL) == -EINVAL);
    CHECK(dmafile_recorder_finish(NULL, NULL) == -EINVAL);
    CHECK(dmafile_recorder_recorded(NULL, NULL) == -EINVAL);
    dmafile_recorder_detach(NULL);
    dmafile_recorder_free(NULL);
}

/* Checks the records of main(). */
static void read_back(const char *path)
{
    static const char text[] = "memory of the caller";
    static unsigned char room[FRAME], frame[FRAME];
    struct dmafile_options how;
    const struct dmafile_record *record;
    struct dmafile_recording *recording = (void *)room;
    struct dmafile_buffer *buffer;
    uint64_t i;

    CHECK(dmafile_recording_open(NULL, &recording) == -EINVAL && recording == NULL);
    CHECK(dmafile_recording_open(path, NULL) == -EINVAL);
    CHECK(dmafile_recording_open("/no/such/file", &recording) == -ENOENT && recording == NULL);
    CHECK(dmafile_recording_open("/proc/self/exe", &recording) == -EBADMSG && says("header"));
    CHECK(dmafile_recording_count(NULL) == 0 && errno == EINVAL);
    CHECK(dmafile_recording_is_complete(NULL) == -EINVAL);
    CHECK(dmafile_recording_record(NULL, 0) == NULL && errno == EINVAL);
    CHECK(dmafile_recording_read(NULL, 0, room, FRAME) == -EINVAL);
    dmafile_recording_free(NULL);

    CHECK(dmafile_recording_open(path, &recording) == 0);
    CHECK(dmafile_recording_count(recording) == 21);
    CHECK(dmafile_recording_is_complete(recording) == 1);
    for (i = 0; i < 20; i++) {
        record = dmafile_recording_record(recording, i);
        CHECK(record != NULL && record->number == i && record->length == FRAME);
        CHECK(record->timestamp == -1000 * (int64_t)i && record->tag == i << 40);
        CHECK(record->dropped == 0 && record->has_checksum == 1);
        CHECK(record->offset % 512 == 0 && access(record->path, R_OK) == 0);
        memset(frame, (int)i + 1, FRAME);
        CHECK(dmafile_recording_read(recording, i, room, FRAME) == FRAME);
        CHECK(memcmp(room, frame, FRAME) == 0);
    }
    CHECK(strcmp(dmafile_recording_record(recording, 0)->path, path) == 0);
    CHECK(strcmp(record->path + strlen(path), ".1") == 0);
    /* A record is a part of a file, which can be loaded like any other. */
    memset(&how, 0, sizeof how);
    how.size = sizeof how;
    how.offset = record->offset;
    how.length = record->length;
    CHECK(dmafile_load(record->path, &how, &buffer) == 0);
    CHECK(dmafile_buffer_read_at(buffer, 0, room, FRAME) == 0 && memcmp(room, frame, FRAME) == 0);
    dmafile_buffer_free(buffer);
    CHECK(dmafile_recording_read(recording, 20, room, sizeof text - 1) == sizeof text - 1);
    CHECK(memcmp(room, text, sizeof text - 1) == 0);
    CHECK(dmafile_recording_read(recording, 20, room, 5) == -ERANGE && says("20 bytes"));
    CHECK(dmafile_recording_read(recording, 20, NULL, FRAME) == -EINVAL);
    CHECK(dmafile_recording_read(recording, 21, room, FRAME) == -ERANGE && says("21 records"));
    CHECK(dmafile_recording_record(recording, UINT64_MAX) == NULL && errno == ERANGE);
    dmafile_recording_free(recording);
}

/* Damages the last record, after which it cannot be read. */
static void damage(const char *path)
{
    const struct dmafile_record *record;
    struct dmafile_recording *recording;
    char room[32];
    int fd;

    CHECK(dmafile_recording_open(path, &recording) == 0);
    record = dmafile_recording_record(recording, 20);
    fd = open(record->path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, "M", 1, (off_t)record->offset) == 1);
    CHECK(dmafile_recording_read(recording, 20, room, sizeof room) == -EBADMSG && says("checksum"));
    CHECK(pwrite(fd, "m", 1, (off_t)record->offset) == 1);
    CHECK(dmafile_recording_read(recording, 20, room, sizeof room) == 20);
    close(fd);
    dmafile_recording_free(recording);
}

/* Exit handlers of a child free what the parent has. */
static void forked(struct dmafile_recorder *recorder)
{
    struct dmafile_recorded recorded;
    int status;
    pid_t child = fork();

    if (child == 0) {
        alarm(60);
        CHECK(dmafile_recorder_sync(recorder) == -EINVAL && says("forked"));
        CHECK(dmafile_recorder_append_memory(recorder, "a", 1, 0, 0) == -EINVAL);
        CHECK(dmafile_recorder_wait(recorder, 0, -1) == -EINVAL);
        CHECK(dmafile_recorder_finish(recorder, &recorded) == -EINVAL && recorded.records == 0);
        dmafile_recorder_free(recorder);
        /* Not exit: valgrind would report what the threads of the parent have allocated. */
        execlp("true", "true", (char *)NULL);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv)
{
    int before = open_files();
    struct dmafile_recorder_options how = options();
    struct dmafile_recorder_buffer *buffers[2];
    struct dmafile_recorder *recorder, *second;
    struct dmafile_recorded recorded;
    static const char text[] = "memory of the caller";
    unsigned char *maps[2];
    int64_t under_way[2] = { -1, -1 }, number;
    int i, fd;

    if (argc != 2)
        return 2;
    refused(argv[1]);
    how.in_flight = 2;
    /* Room for 11 to 19 frames beside the header and the index, whose blocks may have the size of a page. */
    how.rotate_bytes = 1500000 + 65 * (uint64_t)sysconf(_SC_PAGESIZE);
    how.sync_every = 4;
    how.flags = DMAFILE_RECORD_NO_INTERVAL;
    CHECK(dmafile_recorder_new(argv[1], &how, &recorder) == 0);
    CHECK(dmafile_recorder_new(argv[1], &how, &second) < 0 && second == NULL);
    for (i = 0; i < 2; i++) {
        fd = memfd_create("frame", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, FRAME + 4096) == 0);
        maps[i] = mmap(NULL, FRAME + 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(maps[i] != MAP_FAILED);
        CHECK(dmafile_recorder_attach(fd, &buffers[i]) == 0);
        close(fd);
    }
    for (i = 0; i < 20; i++) {
        if (under_way[i % 2] >= 0)
            CHECK(dmafile_recorder_wait(recorder, (uint64_t)under_way[i % 2], -1) == 1);
        memset(maps[i % 2] + 4096, i + 1, FRAME);
        number = dmafile_recorder_append(recorder, buffers[i % 2], 4096, FRAME, -1000L * i,
                                         (uint64_t)i << 40);
        CHECK(number == i);
        under_way[i % 2] = number;
    }
    forked(recorder);
    CHECK(dmafile_recorder_append(recorder, buffers[0], 4096, FRAME + 1, 0, 0) == -EINVAL);
    number = dmafile_recorder_append_memory(recorder, text, sizeof text - 1, -20000, 20ULL << 40);
    CHECK(number == 20);
    CHECK(dmafile_recorder_append_memory(recorder, NULL, 1, 0, 0) == -EINVAL);
    CHECK(dmafile_recorder_wait(recorder, 21, 0) == -EINVAL);
    CHECK(dmafile_recorder_wait_durable(recorder, 20, -1) == 1);
    CHECK(dmafile_recorder_wait_durable(recorder, 3, 0) == 1);
    CHECK(dmafile_recorder_recorded(recorder, &recorded) == 0 && recorded.durable == 21);
    CHECK(dmafile_recorder_sync(recorder) == 0);
    CHECK(dmafile_recorder_finish(recorder, &recorded) == 0);
    CHECK(recorded.records == 21 && recorded.durable == 21 && recorded.dropped == 0);
    CHECK(recorded.bytes == 20 * FRAME + sizeof text - 1 && recorded.files == 2);
    CHECK(dmafile_recorder_append_memory(recorder, text, 1, 0, 0) == -EINVAL);
    CHECK(dmafile_recorder_finish(recorder, NULL) == 0);
    dmafile_recorder_free(recorder);
    for (i = 0; i < 2; i++) {
        dmafile_recorder_detach(buffers[i]);
        munmap(maps[i], FRAME + 4096);
    }
    read_back(argv[1]);
    damage(argv[1]);
    CHECK(open_files() == before);
    return 0;
}
