/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Valid and invalid uses of the library by a C program. Run by install.rs, also under valgrind.
 *
 *     exercise all FILE METHOD      every check; prints what failed and exits with 1
 *     exercise cat FILE METHOD KIND the bytes to stdout, from memory and without the library
 *     exercise model PATH           a model, line by line
 *     exercise dmabufs FILE METHOD KIND COUNT
 *                                   memory that consists of COUNT dma-bufs, if there are any
 */
#define _GNU_SOURCE

#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *file, *method;
static unsigned char *expected;
static size_t size;

static struct dmafile_options options(const char *to)
{
    struct dmafile_options made;

    memset(&made, 0, sizeof made);
    made.size = sizeof made;
    made.to = to;
    made.method = method;
    return made;
}

static struct dmafile_buffer *loaded(const char *to)
{
    struct dmafile_options how = options(to);
    struct dmafile_buffer *buffer = NULL;

    CHECK(dmafile_load(file, &how, &buffer) == 0);
    CHECK(buffer != NULL && dmafile_buffer_len(buffer) == size);
    return buffer;
}

static void read_expected(void)
{
    int fd = open(file, O_RDONLY);
    struct stat stat;
    ssize_t got;
    size_t at = 0;

    CHECK(fd >= 0 && fstat(fd, &stat) == 0);
    size = (size_t)stat.st_size;
    expected = malloc(size);
    while (at < size && (got = read(fd, expected + at, size - at)) > 0)
        at += (size_t)got;
    CHECK(at == size);
    close(fd);
}

/* Failures: the errno, the message, and NULL instead of a handle. */
static void failures(void)
{
    struct dmafile_buffer *buffer = (struct dmafile_buffer *)&size;
    struct dmafile_options how = options("memfd");
    char why[64];
    int whole;

    CHECK(dmafile_strerror_r(why, sizeof why) == 0 && why[0] == 0);
    CHECK(dmafile_load("/no/such/file", &how, &buffer) == -ENOENT);
    CHECK(buffer == NULL);
    CHECK(says("cannot open: /no/such/file: No such file or directory (ENOENT); check the path"));
    /* Like snprintf: returns the length, and truncates the text if it does not fit. */
    whole = dmafile_strerror_r(NULL, 0);
    CHECK(whole > 40 && dmafile_strerror_r(why, 8) == whole && strcmp(why, "cannot ") == 0);
    CHECK(dmafile_strerror_r(NULL, 8) == -EINVAL);

    CHECK(dmafile_load(NULL, &how, &buffer) == -EINVAL && says("path: it is NULL (EINVAL)"));
    CHECK(dmafile_load(file, &how, NULL) == -EINVAL && says("buffer: it is NULL"));
    CHECK(dmafile_load("/", &how, &buffer) == -EISDIR);
    how.to = "nowhere";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("'nowhere' is not one of anon, memfd"));
    how.to = "fd:987654";
    CHECK(dmafile_load(file, &how, &buffer) == -EBADF);
    how.to = "\xff";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("options.to: it is not UTF-8"));
    how = options(NULL);
    how.pages = "2m";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("'2m' is not one of auto, base"));
    how = options(NULL);
    how.method = "magic";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    how = options(NULL);
    how.io = "sideways";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    how = options(NULL);
    how.allocation = "never";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    how = options(NULL);
    how.verify = "sha256=00";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    how.verify = "crc32c=00000000";
    CHECK(dmafile_load(file, &how, &buffer) == -EBADMSG && says("wrong digest") && buffer == NULL);
    how = options(NULL);
    how.offset = size;
    how.length = 1;
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    /* Messages use the option names of the header, not those of the command line. */
    CHECK(says(": offset ") && !says("--"));
    how = options(NULL);
    how.block = 4095;
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("block: ") && !says("--"));
    how = options(NULL);
    how.queue_depth = 4097;
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("queue_depth: ") && !says("--"));
    how = options("anon");
    how.method = "copy-file-range";
    CHECK(dmafile_load(file, &how, &buffer) == -EOPNOTSUPP);
    CHECK(says("leave method and io to auto") && !says("--"));
    how = options(NULL);
    how.flags = 6;
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("options.flags"));
}

/* A struct with a smaller, a larger and no size. */
static void sizes(void)
{
    struct {
        struct dmafile_options known;
        uint64_t later;
    } newer;
    struct dmafile_options how = options("memfd");
    struct dmafile_buffer *buffer;

    CHECK(dmafile_load(file, NULL, &buffer) == 0);
    dmafile_buffer_free(buffer);
    memset(&how, 0, sizeof how);
    CHECK(dmafile_load(file, &how, &buffer) == 0);
    dmafile_buffer_free(buffer);
    how.to = "anon";
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL && says("set it to sizeof"));
    how.size = 8;
    CHECK(dmafile_load(file, &how, &buffer) == -EINVAL);
    how.size = (size_t)-1;
    CHECK(dmafile_load(file, &how, &buffer) == -E2BIG);

    memset(&newer, 0, sizeof newer);
    newer.known = options("memfd");
    newer.known.size = sizeof newer;
    CHECK(dmafile_load(file, &newer.known, &buffer) == 0);
    dmafile_buffer_free(buffer);
    newer.later = 1;
    CHECK(dmafile_load(file, &newer.known, &buffer) == -E2BIG && says("does not know"));
}

/* NULL is an error unless documented otherwise; freeing NULL is a no-op. */
static void nulls(void)
{
    struct dmafile_model *model;
    struct dmafile_buffer *buffer = loaded("memfd");
    char byte;

    CHECK(dmafile_buffer_fd(NULL) == -EINVAL && dmafile_buffer_into_fd(NULL) == -EINVAL);
    CHECK(dmafile_buffer_into_fds(NULL, NULL, 0) == -EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_dma_buf_count(NULL) == 0 && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_dma_buf(NULL, 0) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_len(NULL) == 0 && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_offset(NULL) == 0 && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_data(NULL) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_data_mut(NULL) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(dmafile_buffer_report_json(NULL) == NULL && errno == EINVAL);
    CHECK(dmafile_buffer_seal(NULL) == -EINVAL && dmafile_buffer_send(NULL, 0) == -EINVAL);
    CHECK(dmafile_buffer_receive(0, NULL) == -EINVAL);
    CHECK(dmafile_buffer_read_at(NULL, 0, &byte, 1) == -EINVAL);
    CHECK(dmafile_buffer_read_at(buffer, 0, NULL, 1) == -EINVAL);
    CHECK(dmafile_buffer_read_at(buffer, size, NULL, 0) == 0);
    CHECK(dmafile_buffer_write_at(NULL, 0, &byte, 1) == -EINVAL);
    CHECK(dmafile_buffer_write_at(buffer, 0, NULL, 1) == -EINVAL);
    CHECK(dmafile_buffer_write_at(buffer, 0, NULL, 0) == 0);
    CHECK(dmafile_load_into(file, NULL, NULL, 0) == -EINVAL);
    CHECK(dmafile_token_cancel(NULL) == -EINVAL && dmafile_token_is_cancelled(NULL) == -EINVAL);
    CHECK(dmafile_model_open(NULL, &model) == -EINVAL && model == NULL);
    CHECK(dmafile_model_open(file, NULL) == -EINVAL);
    errno = 0;
    CHECK(dmafile_model_tensor_count(NULL) == 0 && errno == EINVAL);
    CHECK(dmafile_model_tensor(NULL, 0) == NULL && dmafile_model_find(NULL, "x") == NULL);
    CHECK(dmafile_model_format(NULL) == NULL && dmafile_model_json(NULL) == NULL);
    dmafile_buffer_free(buffer);
    CHECK(dmafile_model_load(NULL, NULL, NULL, 0, &buffer) == -EINVAL && buffer == NULL);
    dmafile_buffer_free(NULL);
    dmafile_token_free(NULL);
    dmafile_model_free(NULL);
}

/* Pointers only if no other process can write; access by copying always works. */
static void access_(void)
{
    struct dmafile_buffer *buffer = loaded("anon");
    unsigned char *some = malloc(5000), *bytes;
    const char *report;

    CHECK(memcmp(dmafile_buffer_data(buffer), expected, size) == 0);
    CHECK(dmafile_buffer_fd(buffer) == -EOPNOTSUPP && says("has none (EOPNOTSUPP); load it to"));
    CHECK(dmafile_buffer_send(buffer, 0) == -EOPNOTSUPP && says("; load it to=\"memfd\""));
    errno = 0;
    CHECK(dmafile_buffer_dma_buf_count(buffer) == 0 && errno == 0);
    CHECK(dmafile_buffer_dma_buf(buffer, 0) == NULL && errno == ERANGE && says("0 of 0"));
    CHECK(dmafile_buffer_seal(buffer) == -EOPNOTSUPP && dmafile_buffer_send(buffer, 0) == -EOPNOTSUPP);
    bytes = dmafile_buffer_data_mut(buffer);
    CHECK(bytes != NULL);
    bytes[7] ^= 0xff;
    CHECK(dmafile_buffer_read_at(buffer, 7, some, 1) == 0 && some[0] == (expected[7] ^ 0xff));
    report = dmafile_buffer_report_json(buffer);
    CHECK(report != NULL && report[0] == '{' && strstr(report, "\"kind\":\"anon\"") != NULL);
    CHECK(dmafile_buffer_into_fd(buffer) == -EOPNOTSUPP);

    buffer = loaded("memfd");
    errno = 0;
    CHECK(dmafile_buffer_data(buffer) == NULL && errno == EACCES && says("seal it"));
    errno = 0;
    CHECK(dmafile_buffer_data_mut(buffer) == NULL && errno == EACCES);
    CHECK(dmafile_buffer_read_at(buffer, 1001, some, 5000) == 0);
    CHECK(memcmp(some, expected + 1001, 5000) == 0);
    CHECK(dmafile_buffer_read_at(buffer, size - 1, some, 2) == -EINVAL);
    CHECK(dmafile_buffer_read_at(buffer, UINT64_MAX, some, 2) == -EINVAL);
    CHECK(dmafile_buffer_read_at(buffer, 0, some, SIZE_MAX) == -EINVAL);
    CHECK(dmafile_buffer_write_at(buffer, 1001, "hello", 5) == 0);
    CHECK(dmafile_buffer_read_at(buffer, 1001, some, 5) == 0 && memcmp(some, "hello", 5) == 0);
    CHECK(dmafile_buffer_write_at(buffer, 1001, expected + 1001, 5) == 0);
    CHECK(dmafile_buffer_seal(buffer) == 0);
    CHECK(dmafile_buffer_write_at(buffer, 0, "x", 1) == -EPERM);
    CHECK(memcmp(dmafile_buffer_data(buffer), expected, size) == 0);
    CHECK(dmafile_buffer_data_mut(buffer) == NULL);
    dmafile_buffer_free(buffer);
    free(some);
}

/* Only the given part of existing memory is filled; the bytes around it do not change. */
static void part_of_a_descriptor(void)
{
    const size_t at = 8192 + 100, length = 5000, all = 4 * 8192;
    struct dmafile_options how;
    struct dmafile_buffer *buffer;
    unsigned char *map, some[10];
    char to[64];
    size_t i;
    int made;

    made = memfd_create("mine", MFD_CLOEXEC);
    CHECK(made >= 0 && ftruncate(made, (off_t)all) == 0);
    map = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    CHECK(map != MAP_FAILED);
    memset(map, 0xaa, all);
    snprintf(to, sizeof to, "fd:%d@%lu", made, (unsigned long)at);
    how = options(to);
    how.offset = 100;
    how.length = length;
    CHECK(dmafile_load(file, &how, &buffer) == 0);
    CHECK(dmafile_buffer_offset(buffer) == at && dmafile_buffer_len(buffer) == length);
    CHECK(dmafile_buffer_read_at(buffer, 0, some, sizeof some) == 0);
    CHECK(memcmp(some, expected + 100, sizeof some) == 0);
    dmafile_buffer_free(buffer);
    CHECK(memcmp(map + at, expected + 100, length) == 0);
    for (i = 0; i < all; i++)
        CHECK((i >= at && i < at + length) || map[i] == 0xaa);
    snprintf(to, sizeof to, "fd:%d@%lu", made, (unsigned long)all);
    how = options(to);
    CHECK(dmafile_load(file, &how, &buffer) < 0 && buffer == NULL && !says("--"));
    munmap(map, all);
    close(made);
}

/* The descriptor outlives its buffer. */
static void descriptors(void)
{
    struct dmafile_options how;
    struct dmafile_buffer *buffer = loaded("memfd");
    char to[32];
    void *map;
    int fd, made;

    CHECK(dmafile_buffer_dma_buf_count(buffer) == 0);
    CHECK(dmafile_buffer_into_fds(buffer, &fd, 0) == -ERANGE && says("room for 0"));
    CHECK(dmafile_buffer_into_fds(loaded("memfd"), NULL, 1) == -EINVAL);
    CHECK(dmafile_buffer_into_fds(loaded("anon"), &fd, 1) == -EOPNOTSUPP);
    CHECK(dmafile_buffer_into_fds(loaded("memfd"), &fd, 1) == 1 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    close(fd);
    buffer = loaded("memfd");
    fd = dmafile_buffer_into_fd(buffer);
    CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && memcmp(map, expected, size) == 0);
    munmap(map, size);
    close(fd);

    /* Memory of the caller. */
    made = memfd_create("mine", MFD_CLOEXEC);
    CHECK(made >= 0 && ftruncate(made, (off_t)size + 100) == 0);
    snprintf(to, sizeof to, "fd:%d", made);
    how = options(to);
    CHECK(dmafile_load(file, &how, &buffer) == 0);
    CHECK(dmafile_buffer_fd(buffer) != made && dmafile_buffer_offset(buffer) == 0);
    dmafile_buffer_free(buffer);
    map = mmap(NULL, size, PROT_READ, MAP_SHARED, made, 0);
    CHECK(map != MAP_FAILED && memcmp(map, expected, size) == 0);
    munmap(map, size);
    close(made);
    part_of_a_descriptor();
}

static void memory_of_the_caller(void)
{
    struct dmafile_options how = options(NULL);
    unsigned char *memory;
    size_t i;

    CHECK(posix_memalign((void **)&memory, 4096, size + 50) == 0);
    memset(memory, 0xaa, size + 50);
    CHECK(dmafile_load_into(file, &how, memory, size + 50) == (int64_t)size);
    CHECK(memcmp(memory, expected, size) == 0);
    for (i = size; i < size + 50; i++)
        CHECK(memory[i] == 0);
    how.offset = 4096;
    how.length = 9999;
    CHECK(dmafile_load_into(file, &how, memory + 1, 9999) == 9999);
    CHECK(memcmp(memory + 1, expected + 4096, 9999) == 0);
    CHECK(dmafile_load_into(file, &how, memory, 9998) == -EINVAL);
    CHECK(dmafile_load_into(file, &how, memory, 0) == -EINVAL);
    CHECK(dmafile_load_into(file, &how, memory, SIZE_MAX) == -EINVAL);
    how.to = "anon";
    CHECK(dmafile_load_into(file, &how, memory, 9999) == -EINVAL && says("options.to"));
    free(memory);
}

static int read_object(void *user, uint64_t offset, void *memory, size_t len)
{
    const uint64_t *bad = user;

    if (offset + len > size)
        return -EFAULT;
    if (bad && offset >= *bad)
        return -EHOSTUNREACH;
    memcpy(memory, expected + offset, len);
    return 0;
}

static void objects(void)
{
    struct dmafile_options how = {0};
    struct dmafile_buffer *buffer;
    uint64_t bad = 8192;
    const void *bytes;

    how.size = sizeof how;
    how.to = "anon";
    how.block = 4096;
    CHECK(dmafile_load_object("my://object", size, read_object, NULL, &how, &buffer) == 0);
    bytes = dmafile_buffer_data(buffer);
    CHECK(bytes && dmafile_buffer_len(buffer) == size && memcmp(bytes, expected, size) == 0);
    dmafile_buffer_free(buffer);
    how.offset = 777;
    how.length = 5000;
    CHECK(dmafile_load_object("my://object", size, read_object, NULL, &how, &buffer) == 0);
    CHECK(memcmp(dmafile_buffer_data(buffer), expected + 777, 5000) == 0);
    dmafile_buffer_free(buffer);
    how.offset = how.length = 0;
    CHECK(dmafile_load_object("my://object", size, read_object, &bad, &how, &buffer) == -EHOSTUNREACH);
    CHECK(buffer == NULL && says("my://object at byte"));
    CHECK(dmafile_load_object("my://object", 0, read_object, NULL, NULL, &buffer) == -ENODATA);
    CHECK(dmafile_load_object("my://object", size, NULL, NULL, NULL, &buffer) == -EINVAL);
    CHECK(dmafile_load_object(NULL, size, read_object, NULL, NULL, &buffer) == -EINVAL);
}

struct told {
    uint64_t calls, done, total;
};

static void tell(uint64_t done, uint64_t total, void *user)
{
    struct told *told = user;

    CHECK(done >= told->done && done <= total);
    told->calls++;
    told->done = done;
    told->total = total;
}

static void progress_and_cancel(void)
{
    struct dmafile_options how = options("memfd");
    struct dmafile_token *token = dmafile_token_new();
    struct dmafile_buffer *buffer;
    struct told told = {0, 0, 0};

    how.progress = tell;
    how.user = &told;
    how.cancel = token;
    CHECK(token != NULL && dmafile_token_is_cancelled(token) == 0);
    CHECK(dmafile_load(file, &how, &buffer) == 0);
    CHECK(told.calls >= 1 && told.done == told.total && told.total == size);
    dmafile_buffer_free(buffer);
    CHECK(dmafile_token_cancel(token) == 0 && dmafile_token_is_cancelled(token) == 1);
    CHECK(dmafile_load(file, &how, &buffer) == -ECANCELED && buffer == NULL && says("cancelled"));
    dmafile_token_free(token);
}

/* Loads and errors of threads are independent, and all threads read one buffer. */
static void *thread(void *shared)
{
    const struct dmafile_buffer *common = shared;
    unsigned char some[777];
    char name[32];
    int round;

    snprintf(name, sizeof name, "/none/%lx", (unsigned long)pthread_self());
    for (round = 0; round < 3; round++) {
        struct dmafile_buffer *own, *none;
        uint64_t at = (uint64_t)round * 1000;

        CHECK(dmafile_load(name, NULL, &none) == -ENOENT);
        own = loaded(round % 2 ? "anon" : "memfd");
        CHECK(dmafile_buffer_read_at(own, 0, some, sizeof some) == 0);
        CHECK(memcmp(some, expected, sizeof some) == 0);
        dmafile_buffer_free(own);
        CHECK(dmafile_buffer_read_at(common, at, some, sizeof some) == 0);
        CHECK(memcmp(some, expected + at, sizeof some) == 0);
        CHECK(says(name));
    }
    return NULL;
}

static void threads(void)
{
    struct dmafile_buffer *common = loaded("memfd");
    pthread_t ids[6];
    size_t i;

    for (i = 0; i < sizeof ids / sizeof *ids; i++)
        CHECK(pthread_create(&ids[i], NULL, thread, common) == 0);
    for (i = 0; i < sizeof ids / sizeof *ids; i++)
        CHECK(pthread_join(ids[i], NULL) == 0);
    dmafile_buffer_free(common);
}

/* A buffer sent to another process is the same memory. */
static void another_process(void)
{
    struct dmafile_buffer *buffer;
    unsigned char *some = malloc(size);
    int pair[2], status;
    pid_t child;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char bye;

        close(pair[0]);
        buffer = loaded("memfd");
        CHECK(dmafile_buffer_send(buffer, pair[1]) == 0);
        CHECK(read(pair[1], &bye, 1) == 1);
        /* The sender sees what the receiver wrote. */
        CHECK(dmafile_buffer_read_at(buffer, 0, some, 5) == 0 && memcmp(some, "there", 5) == 0);
        dmafile_buffer_free(buffer);
        close(pair[1]);
        free(some);
        free(expected);
        exit(0);
    }
    close(pair[1]);
    CHECK(dmafile_buffer_receive(pair[0], &buffer) == 0);
    CHECK(dmafile_buffer_len(buffer) == size);
    CHECK(dmafile_buffer_read_at(buffer, 0, some, size) == 0 && memcmp(some, expected, size) == 0);
    errno = 0;
    CHECK(dmafile_buffer_report_json(buffer) == NULL && errno == ENODATA);
    CHECK(dmafile_buffer_write_at(buffer, 0, "there", 5) == 0);
    CHECK(write(pair[0], "!", 1) == 1);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    dmafile_buffer_free(buffer);

    /* A closed sender; and descriptors that are not a socket, or messages that are not a buffer. */
    CHECK(dmafile_buffer_receive(pair[0], &buffer) == -ECONNRESET && buffer == NULL);
    CHECK(dmafile_buffer_receive(-1, &buffer) == -EBADF);
    CHECK(dmafile_buffer_receive(987654, &buffer) == -EBADF);
    close(pair[0]);
    pair[0] = open("/dev/null", O_RDWR);
    CHECK(dmafile_buffer_receive(pair[0], &buffer) == -ENOTSOCK);
    close(pair[0]);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(write(pair[1], "this is no buffer at all", 24) == 24);
    CHECK(dmafile_buffer_receive(pair[0], &buffer) == -EPROTO && buffer == NULL);
    close(pair[0]);
    close(pair[1]);
    free(some);
}

static int all(void)
{
    int before = open_files();

    CHECK(strcmp(dmafile_version(), VERSION) == 0);
    failures();
    sizes();
    nulls();
    access_();
    descriptors();
    memory_of_the_caller();
    objects();
    progress_and_cancel();
    threads();
    another_process();
    /* No descriptor has leaked. */
    CHECK(open_files() == before);
    return 0;
}

/* Through the descriptor or the pointer, independent of the library's own reader. */
static int cat(const char *kind)
{
    struct dmafile_buffer *buffer = loaded(kind);
    uint64_t offset = dmafile_buffer_offset(buffer);
    const unsigned char *bytes = dmafile_buffer_data(buffer);
    void *map = MAP_FAILED;
    size_t at;
    ssize_t put;

    if (bytes == NULL) {
        map = mmap(NULL, offset + size, PROT_READ, MAP_SHARED, dmafile_buffer_fd(buffer), 0);
        CHECK(map != MAP_FAILED);
        bytes = (const unsigned char *)map + offset;
    }
    for (at = 0; at < size; at += (size_t)put) {
        put = write(STDOUT_FILENO, bytes + at, size - at);
        CHECK(put > 0);
    }
    if (map != MAP_FAILED)
        munmap(map, offset + size);
    dmafile_buffer_free(buffer);
    return 0;
}

static void read_all(const struct dmafile_buffer *buffer)
{
    unsigned char *some = malloc(size);

    CHECK(dmafile_buffer_read_at(buffer, 0, some, size) == 0 && memcmp(some, expected, size) == 0);
    free(some);
}

/* The dma-bufs are the memory, in order; their mappings have its bytes. */
static uint64_t map_all(const struct dmafile_buffer *buffer, size_t count)
{
    uint64_t at = 0, offset = dmafile_buffer_offset(buffer), seen = 0;
    size_t i, k;

    for (i = 0; i < count; i++) {
        const struct dmafile_dma_buf *one = dmafile_buffer_dma_buf(buffer, i);
        unsigned char *map;

        CHECK(one != NULL && one == dmafile_buffer_dma_buf(buffer, i) && one->at == at);
        map = mmap(NULL, one->bytes, PROT_READ, MAP_SHARED, one->fd, 0);
        CHECK(map != MAP_FAILED && lseek(one->fd, 0, SEEK_END) == (off_t)one->bytes);
        for (k = 0; k < one->bytes; k++)
            if (at + k >= offset && at + k < offset + size)
                seen += map[k] == expected[at + k - offset];
        munmap(map, one->bytes);
        at += one->bytes;
    }
    CHECK(at >= offset + size);
    return seen;
}

static int dma_bufs(const char *kind, size_t count)
{
    struct dmafile_buffer *buffer = loaded(kind), *received;
    unsigned char some[10];
    int fds[256], pair[2];
    uint64_t edge;
    size_t i;

    CHECK(count > 0 && count <= 256 && dmafile_buffer_dma_buf_count(buffer) == count);
    errno = 0;
    CHECK(dmafile_buffer_dma_buf(buffer, count) == NULL && errno == ERANGE);
    CHECK(map_all(buffer, count) == size);
    read_all(buffer);
    /* Across the end of the first dma-buf, if there is another. */
    edge = dmafile_buffer_dma_buf(buffer, 0)->bytes - dmafile_buffer_offset(buffer);
    edge = count > 1 ? edge - 5 : 0;
    CHECK(dmafile_buffer_write_at(buffer, edge, "0123456789", 10) == 0);
    CHECK(dmafile_buffer_read_at(buffer, edge, some, 10) == 0 && memcmp(some, "0123456789", 10) == 0);
    CHECK(map_all(buffer, count) < size);
    CHECK(dmafile_buffer_write_at(buffer, edge, expected + edge, 10) == 0);
    CHECK(map_all(buffer, count) == size);

    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(dmafile_buffer_send(buffer, pair[0]) == 0);
    CHECK(dmafile_buffer_receive(pair[1], &received) == 0);
    close(pair[0]);
    close(pair[1]);
    CHECK(dmafile_buffer_dma_buf_count(received) == count && map_all(received, count) == size);
    read_all(received);
    if (count > 1) {
        CHECK(dmafile_buffer_fd(buffer) == -EFBIG && says("; use dmafile_buffer_dma_buf, or raise"));
        CHECK(dmafile_buffer_into_fd(received) == -EFBIG && says("; use dmafile_buffer_into_fds,"));
        CHECK(dmafile_buffer_into_fds(loaded(kind), fds, count - 1) == -ERANGE);
    } else {
        CHECK(dmafile_buffer_fd(buffer) == dmafile_buffer_dma_buf(buffer, 0)->fd);
        dmafile_buffer_free(received);
    }
    CHECK(dmafile_buffer_into_fds(buffer, fds, 256) == (int)count);
    for (i = 0; i < count; i++) {
        CHECK(lseek(fds[i], 0, SEEK_END) > 0 && (fcntl(fds[i], F_GETFD) & FD_CLOEXEC));
        close(fds[i]);
    }
    return 0;
}

static void show(const struct dmafile_tensor *tensor, const unsigned char *bytes)
{
    size_t i;

    printf("%s %s", tensor->name, tensor->dtype);
    for (i = 0; i < tensor->ndim; i++)
        printf(" %llu", (unsigned long long)tensor->shape[i]);
    printf(" =");
    for (i = 0; i < tensor->bytes; i++)
        printf(" %02x", bytes[tensor->at + i]);
    printf("\n");
}

static int model(const char *path)
{
    struct dmafile_options how = options("anon");
    const struct dmafile_tensor *first;
    struct dmafile_model *model;
    struct dmafile_buffer *buffer;
    const char *tensors[1], *json;
    size_t count, i;

    CHECK(dmafile_model_open("/no/such/model", &model) == -ENOENT && model == NULL);
    CHECK(dmafile_model_open(path, &model) == 0);
    count = dmafile_model_tensor_count(model);
    CHECK(count > 1);
    errno = 0;
    CHECK(dmafile_model_tensor(model, count) == NULL && errno == ERANGE);
    errno = 0;
    CHECK(dmafile_model_find(model, "nothing like it") == NULL && errno == ENOENT);
    for (i = 0; i < count; i++) {
        const struct dmafile_tensor *tensor = dmafile_model_tensor(model, i);

        CHECK(tensor != NULL && dmafile_model_find(model, tensor->name) == tensor);
    }
    json = dmafile_model_json(model);
    CHECK(json != NULL && json == dmafile_model_json(model) && strstr(json, "\"metadata\"") != NULL);
    CHECK(strstr(json, dmafile_model_format(model)) != NULL);

    CHECK(dmafile_model_load(model, &how, NULL, 1, &buffer) == -EINVAL && buffer == NULL);
    tensors[0] = NULL;
    CHECK(dmafile_model_load(model, &how, tensors, 1, &buffer) == -EINVAL);
    tensors[0] = "re:(";
    CHECK(dmafile_model_load(model, &how, tensors, 1, &buffer) == -EINVAL && says("is not a valid pattern"));
    tensors[0] = "none.*";
    CHECK(dmafile_model_load(model, &how, tensors, 1, &buffer) == -ENOENT && says("none.*"));

    CHECK(dmafile_model_load(model, &how, NULL, 0, &buffer) == 0);
    for (i = 0; i < count; i++)
        show(dmafile_model_tensor(model, i), dmafile_buffer_data(buffer));
    dmafile_buffer_free(buffer);
    first = dmafile_model_tensor(model, 0);
    tensors[0] = first->name;
    CHECK(dmafile_model_load(model, &how, tensors, 1, &buffer) == 0);
    printf("only ");
    show(first, dmafile_buffer_data(buffer));
    /* The buffer outlives the model. */
    dmafile_model_free(model);
    CHECK(dmafile_buffer_len(buffer) > 0 && dmafile_buffer_data(buffer) != NULL);
    dmafile_buffer_free(buffer);
    return 0;
}

int main(int argc, char **argv)
{
    int status = 2;

    if (argc == 3 && strcmp(argv[1], "model") == 0)
        return model(argv[2]);
    if (argc >= 4) {
        file = argv[2];
        method = argv[3];
        read_expected();
        if (argc == 4 && strcmp(argv[1], "all") == 0)
            status = all();
        else if (argc == 5 && strcmp(argv[1], "cat") == 0)
            status = cat(argv[4]);
        else if (argc == 6 && strcmp(argv[1], "dmabufs") == 0)
            status = dma_bufs(argv[4], (size_t)atoi(argv[5]));
        free(expected);
    }
    return status;
}
