/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Records a camera without a copy by the CPU: the camera fills dma-bufs, and the disk reads the frames from
 * there, each one while the next is being filled. C99, on Linux with /dev/udmabuf for `import`.
 *
 *     cc -std=c99 record_camera.c $(pkg-config --cflags --libs dmafile) -o record_camera
 *
 *     ./record_camera DEVICE FRAMES FILE import|export [--method METHOD] [--frames FOLDER]
 *
 * import: the frames are memfds of this program, which the camera's driver imports as dma-bufs (udmabuf,
 * V4L2_MEMORY_DMABUF). export: they are memory of the driver, exported as dma-bufs (VIDIOC_EXPBUF). A record has
 * the frame's timestamp, and as its tag the frame's number. --method is how frames are written, with direct
 * I/O: with "uring" the disk reads them in place, or the recording fails. --frames also writes each frame to a
 * separate file, from the buffer before the camera gets it back: for tests, because that is a copy.
 */
#define _GNU_SOURCE

#include <dmafile.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/dma-buf.h>
#include <linux/udmabuf.h>
#include <linux/videodev2.h>

#define BUFFERS 4

static int camera, imports;
/* The driver's descriptors of the buffers, and the memory to record. */
static int dma_bufs[BUFFERS];
static struct dmafile_recorder_buffer *frames[BUFFERS];
/* The record of a buffer that is being written, or -1. */
static int64_t records[BUFFERS];

static void fail(const char *what)
{
    fprintf(stderr, "record_camera: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Prints the message of the last failure. */
static void fail_dmafile(void)
{
    char why[1024];

    dmafile_strerror_r(why, sizeof why);
    fprintf(stderr, "record_camera: %s\n", why);
    exit(1);
}

static void call(unsigned long request, void *argument, const char *what)
{
    while (ioctl(camera, request, argument) != 0)
        if (errno != EINTR)
            fail(what);
}

static struct v4l2_buffer buffer_of(unsigned index)
{
    struct v4l2_buffer buffer;

    memset(&buffer, 0, sizeof buffer);
    buffer.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    buffer.memory = imports ? V4L2_MEMORY_DMABUF : V4L2_MEMORY_MMAP;
    buffer.index = index;
    if (imports)
        buffer.m.fd = dma_bufs[index];
    return buffer;
}

/* Queues a buffer, so that the camera may fill it. */
static void give(unsigned index)
{
    struct v4l2_buffer buffer = buffer_of(index);

    call(VIDIOC_QBUF, &buffer, "VIDIOC_QBUF");
}

/* Creates a memfd, which the disk reads from, with a dma-buf over it for the driver. */
static void make(unsigned index, size_t size)
{
    struct udmabuf_create create;
    int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
    int memory = memfd_create("frame", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (node < 0)
        fail("/dev/udmabuf");
    if (memory < 0 || ftruncate(memory, (off_t)size) != 0)
        fail("memfd_create");
    if (fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
        fail("F_SEAL_SHRINK");
    memset(&create, 0, sizeof create);
    create.memfd = (unsigned)memory;
    create.flags = UDMABUF_FLAGS_CLOEXEC;
    create.size = size;
    dma_bufs[index] = ioctl(node, UDMABUF_CREATE, &create);
    if (dma_bufs[index] < 0)
        fail("UDMABUF_CREATE");
    if (dmafile_recorder_attach(memory, &frames[index]) < 0)
        fail_dmafile();
    close(memory);
    close(node);
}

static void export(unsigned index)
{
    struct v4l2_exportbuffer request;

    memset(&request, 0, sizeof request);
    request.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    request.index = index;
    request.flags = O_RDWR | O_CLOEXEC;
    call(VIDIOC_EXPBUF, &request, "VIDIOC_EXPBUF");
    dma_bufs[index] = request.fd;
    if (dmafile_recorder_attach(request.fd, &frames[index]) < 0)
        fail_dmafile();
}

/* Writes a frame to a separate file; the CPU reads it from the buffer. */
static void keep(const char *folder, unsigned index, unsigned number, size_t bytes)
{
    struct dma_buf_sync sync = { DMA_BUF_SYNC_START | DMA_BUF_SYNC_READ };
    char name[4096];
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, dma_bufs[index], 0);
    FILE *file;

    if (map == MAP_FAILED)
        fail("mmap");
    if (ioctl(dma_bufs[index], DMA_BUF_IOCTL_SYNC, &sync) != 0)
        fail("DMA_BUF_IOCTL_SYNC");
    snprintf(name, sizeof name, "%s/%u", folder, number);
    file = fopen(name, "w");
    if (file == NULL || fwrite(map, 1, bytes, file) != bytes || fclose(file) != 0)
        fail(name);
    sync.flags = DMA_BUF_SYNC_END | DMA_BUF_SYNC_READ;
    if (ioctl(dma_bufs[index], DMA_BUF_IOCTL_SYNC, &sync) != 0)
        fail("DMA_BUF_IOCTL_SYNC");
    munmap(map, bytes);
}

/* Returns buffers whose records are written to the camera; with `wait`, waits for the others. */
static void give_back(struct dmafile_recorder *recorder, int wait)
{
    for (unsigned index = 0; index < BUFFERS; index++) {
        int written;

        if (records[index] < 0)
            continue;
        written = dmafile_recorder_wait(recorder, (uint64_t)records[index], wait ? -1 : 0);
        if (written < 0)
            fail_dmafile();
        if (written == 0)
            continue;
        records[index] = -1;
        give(index);
        wait = 0;
    }
}

int main(int argc, char **argv)
{
    struct dmafile_recorder *recorder;
    struct dmafile_recorder_options how;
    struct dmafile_recorded recorded;
    struct v4l2_requestbuffers request;
    struct v4l2_format format;
    enum v4l2_buf_type type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    const char *folder = NULL;
    unsigned wanted, got, at_camera;
    size_t size;

    memset(&how, 0, sizeof how);
    for (int at = 5; at + 1 < argc; at += 2) {
        if (strcmp(argv[at], "--frames") == 0) {
            folder = argv[at + 1];
        } else if (strcmp(argv[at], "--method") == 0) {
            how.method = argv[at + 1];
            how.io = "direct";
        } else {
            argc = 0;
        }
    }
    if (argc < 5 || argc % 2 == 0 ||
        (strcmp(argv[4], "import") != 0 && strcmp(argv[4], "export") != 0)) {
        fprintf(stderr, "usage: record_camera DEVICE FRAMES FILE import|export [--method METHOD] "
                        "[--frames FOLDER]\n");
        return 2;
    }
    wanted = (unsigned)strtoul(argv[2], NULL, 10);
    imports = strcmp(argv[4], "import") == 0;
    camera = open(argv[1], O_RDWR | O_CLOEXEC);
    if (camera < 0)
        fail(argv[1]);
    memset(&format, 0, sizeof format);
    format.type = type;
    call(VIDIOC_G_FMT, &format, "VIDIOC_G_FMT");
    size = (format.fmt.pix.sizeimage + 4095UL) / 4096 * 4096;

    memset(&request, 0, sizeof request);
    request.type = type;
    request.memory = imports ? V4L2_MEMORY_DMABUF : V4L2_MEMORY_MMAP;
    request.count = BUFFERS;
    call(VIDIOC_REQBUFS, &request, "VIDIOC_REQBUFS");
    if (request.count < BUFFERS) {
        fprintf(stderr, "record_camera: the driver has %u buffers only\n", request.count);
        return 1;
    }
    how.size = sizeof how;
    how.in_flight = BUFFERS - 1; /* The camera fills the other one. */
    if (dmafile_recorder_new(argv[3], &how, &recorder) < 0)
        fail_dmafile();
    for (unsigned index = 0; index < BUFFERS; index++) {
        if (imports)
            make(index, size);
        else
            export(index);
        records[index] = -1;
        give(index);
    }
    call(VIDIOC_STREAMON, &type, "VIDIOC_STREAMON");
    for (got = 0; got < wanted; got++) {
        struct v4l2_buffer frame = buffer_of(0);
        int64_t record, time;

        at_camera = 0;
        for (unsigned index = 0; index < BUFFERS; index++)
            at_camera += records[index] < 0;
        give_back(recorder, at_camera == 0);
        call(VIDIOC_DQBUF, &frame, "VIDIOC_DQBUF");
        time = frame.timestamp.tv_sec * 1000000000LL + frame.timestamp.tv_usec * 1000LL;
        record = dmafile_recorder_append(recorder, frames[frame.index], 0, frame.bytesused, time,
                                         frame.sequence);
        if (record < 0)
            fail_dmafile();
        records[frame.index] = record;
        if (folder != NULL)
            keep(folder, frame.index, frame.sequence, frame.bytesused);
    }
    if (dmafile_recorder_finish(recorder, &recorded) < 0)
        fail_dmafile();
    call(VIDIOC_STREAMOFF, &type, "VIDIOC_STREAMOFF");
    printf("%llu frames, %llu bytes\n", (unsigned long long)recorded.records,
           (unsigned long long)recorded.bytes);
    dmafile_recorder_free(recorder);
    for (unsigned index = 0; index < BUFFERS; index++) {
        dmafile_recorder_detach(frames[index]);
        close(dma_bufs[index]);
    }
    close(camera);
    return 0;
}
