/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Loads a file into memory that can be shared, and reads it; sends it to another process, or receives
 * it there. C99.
 *
 *     cc -std=c99 load.c $(pkg-config --cflags --libs dmafile) -o load
 *
 *     ./load FILE [--to KIND] [--method METHOD] [--verify ALGO[=HEX]] [--send SOCKET] [--report]
 *     ./load --receive SOCKET
 *
 * To see both sides: ./load --receive /tmp/s & ./load FILE --send /tmp/s
 */
#define _POSIX_C_SOURCE 200809L

#include <dmafile.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

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
    fprintf(stderr, "load: %s\n", why);
    return 1;
}

/* Reads the bytes through the library: this also works if others may be writing. */
static int look(const struct dmafile_buffer *buffer)
{
    static unsigned char chunk[1 << 16];
    uint64_t len = dmafile_buffer_len(buffer), at, sum = 0;
    int fd = dmafile_buffer_fd(buffer);

    if (fd >= 0)
        printf("fd %d, its bytes from %llu\n", fd, (unsigned long long)dmafile_buffer_offset(buffer));
    else if (fd == -EOPNOTSUPP)
        printf("no fd: private memory\n");
    else if (fd == -EFBIG)
        printf("%lu dma-bufs\n", (unsigned long)dmafile_buffer_dma_buf_count(buffer));
    else
        return fail();
    printf("bytes %llu\n", (unsigned long long)len);
    for (at = 0; at < len; at += sizeof chunk) {
        size_t n = len - at < sizeof chunk ? (size_t)(len - at) : sizeof chunk, i;

        if (dmafile_buffer_read_at(buffer, at, chunk, n) < 0)
            return fail();
        if (at == 0) {
            printf("first");
            for (i = 0; i < n && i < 8; i++)
                printf(" %02x", chunk[i]);
            printf("\n");
        }
        for (i = 0; i < n; i++)
            sum += chunk[i];
    }
    printf("sum %llu\n", (unsigned long long)sum);
    return 0;
}

static int address(const char *path, struct sockaddr_un *to)
{
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    if (strlen(path) >= sizeof to->sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(to->sun_path, path);
    return socket(AF_UNIX, SOCK_STREAM, 0);
}

static int send_to(const struct dmafile_buffer *buffer, const char *path)
{
    struct sockaddr_un to;
    int fd = address(path, &to), status = 0;

    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) < 0) {
        perror(path);
        status = 1;
    } else if (dmafile_buffer_send(buffer, fd) < 0) {
        status = fail();
    }
    if (fd >= 0)
        close(fd);
    return status;
}

static int receive_at(const char *path)
{
    struct dmafile_buffer *buffer;
    struct sockaddr_un here;
    int status, peer = -1, fd = address(path, &here);

    if (fd < 0 || bind(fd, (struct sockaddr *)&here, sizeof here) < 0 || listen(fd, 1) < 0) {
        perror(path);
        if (fd >= 0)
            close(fd);
        return 1;
    }
    printf("waiting at %s\n", path);
    fflush(stdout);
    peer = accept(fd, NULL, NULL);
    unlink(path);
    close(fd);
    if (peer < 0) {
        perror(path);
        return 1;
    }
    status = dmafile_buffer_receive(peer, &buffer) < 0 ? fail() : look(buffer);
    close(peer);
    dmafile_buffer_free(buffer);
    return status;
}

int main(int argc, char **argv)
{
    struct dmafile_options options = {0};
    struct dmafile_buffer *buffer;
    struct sigaction action;
    const char *file = NULL, *receive = NULL, *send = NULL;
    int i, report = 0, status;

    options.size = sizeof options;
    for (i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        const char **into = strcmp(argv[i], "--to") == 0        ? &options.to
                            : strcmp(argv[i], "--method") == 0  ? &options.method
                            : strcmp(argv[i], "--verify") == 0  ? &options.verify
                            : strcmp(argv[i], "--receive") == 0 ? &receive
                            : strcmp(argv[i], "--send") == 0    ? &send
                                                                : NULL;

        if (into != NULL && value != NULL) {
            *into = value;
            i++;
        } else if (strcmp(argv[i], "--report") == 0) {
            report = 1;
        } else if (file == NULL && argv[i][0] != '-') {
            file = argv[i];
        } else {
            file = receive = NULL;
            break;
        }
    }
    if (receive != NULL && file == NULL)
        return receive_at(receive);
    if (file == NULL || receive != NULL) {
        fprintf(stderr, "usage: load FILE [--to KIND] [--method METHOD] [--verify ALGO[=HEX]] "
                        "[--send SOCKET] [--report]\n"
                        "       load --receive SOCKET\n");
        return 2;
    }

    /* Ctrl-C ends the load, and it leaves nothing behind. */
    stop = dmafile_token_new();
    if (stop == NULL)
        return fail();
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, NULL);
    options.cancel = stop;
    if (isatty(STDERR_FILENO))
        options.progress = on_progress;

    status = dmafile_load(file, &options, &buffer);
    /* There is nothing to cancel any more. */
    action.sa_handler = SIG_DFL;
    sigaction(SIGINT, &action, NULL);
    if (status < 0) {
        status = fail();
    } else {
        status = look(buffer);
        if (report)
            printf("report %s\n", dmafile_buffer_report_json(buffer));
        if (status == 0 && send != NULL)
            status = send_to(buffer, send);
        dmafile_buffer_free(buffer);
    }
    dmafile_token_free(stop);
    return status;
}
