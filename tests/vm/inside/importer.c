/*
 * importer vgem         imports a dma-buf into a graphics driver: attaches its device and maps the memory for DMA
 * importer vivid        shows a dma-buf on a virtual video output, and prints what the connected input receives
 * importer receive      prints the bytes of a dma-buf that it receives from the socket at standard input
 * importer send WORDS   starts the program `WORDS`, sends it the dma-buf, and waits for it
 *
 * The COMMAND of a load. vivid reads through the exporter's vmap() in a kernel thread. This differs from mmap(), and is
 * what most drivers without a DMA engine do.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/videodev2.h>

#include "drm.h"
#include "write_all.h"

/* A frame of 1280 x 720 pixels of four bytes: 900 pages. */
#define WIDTH	1280
#define HEIGHT	720
#define FRAME	(WIDTH * HEIGHT * 4)
/* The control of vivid that selects which output feeds its input. */
#define CABLE	"HDMI 000-0 Is Connected To"

static void xioctl(int fd, unsigned long request, void *argument, const char *what)
{
	while (ioctl(fd, request, argument))
		if (errno != EINTR)
			err(1, "%s", what);
}

static int inherited(void)
{
	const char *number = getenv("DMAFILE_FD");

	if (!number || strchr(number, ','))
		errx(1, "one descriptor in DMAFILE_FD is wanted");
	return atoi(number);
}

static void vgem(void)
{
	struct drm_prime_handle prime = { .fd = inherited() };
	struct drm_gem_close done = { 0 };
	int fd = drm_open("vgem");
	off_t size = lseek(prime.fd, 0, SEEK_END);
	void *map;

	if (fd < 0)
		errx(1, "no vgem");
	xioctl(fd, DRM_IOCTL_PRIME_FD_TO_HANDLE, &prime, "PRIME_FD_TO_HANDLE");
	/* Now, only the object of the driver keeps the memory. */
	close(prime.fd);
	prime.flags = O_CLOEXEC;
	xioctl(fd, DRM_IOCTL_PRIME_HANDLE_TO_FD, &prime, "PRIME_HANDLE_TO_FD");
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, prime.fd, 0);
	if (map == MAP_FAILED)
		err(1, "mmap");
	write_all(map, size);
	done.handle = prime.handle;
	xioctl(fd, DRM_IOCTL_GEM_CLOSE, &done, "GEM_CLOSE");
}

/* Finds the two nodes of vivid by their capabilities. */
static int video(uint32_t capability)
{
	for (int number = 0; number < 16; number++) {
		struct v4l2_capability can = { 0 };
		char path[32];
		int fd;

		snprintf(path, sizeof(path), "/dev/video%d", number);
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd < 0)
			continue;
		xioctl(fd, VIDIOC_QUERYCAP, &can, path);
		if (!strcmp((char *)can.driver, "vivid") && can.device_caps & capability)
			return fd;
		close(fd);
	}
	errx(1, "no vivid");
}

/* The control with this name; vivid chooses the numbers. */
static struct v4l2_query_ext_ctrl control_of(int fd, const char *name)
{
	struct v4l2_query_ext_ctrl control = { .id = V4L2_CTRL_FLAG_NEXT_CTRL };

	while (!ioctl(fd, VIDIOC_QUERY_EXT_CTRL, &control)) {
		if (!strcmp(control.name, name))
			return control;
		control.id |= V4L2_CTRL_FLAG_NEXT_CTRL;
	}
	errx(1, "no control %s", name);
}

/* Whether a control is set to the choice whose name begins with this text. */
static bool chosen(int fd, const char *name, const char *choice)
{
	struct v4l2_control control = { .id = control_of(fd, name).id };
	struct v4l2_querymenu menu = { .id = control.id };

	xioctl(fd, VIDIOC_G_CTRL, &control, name);
	menu.index = control.value;
	return !ioctl(fd, VIDIOC_QUERYMENU, &menu) && !strncmp((char *)menu.name, choice, strlen(choice));
}

/* Sets a control to that choice, which may be missing for a moment. */
static void choose(int fd, const char *name, const char *choice)
{
	struct v4l2_query_ext_ctrl control = control_of(fd, name);

	for (int tries = 0; tries < 1000; tries++) {
		for (int64_t index = control.minimum; index <= control.maximum; index++) {
			struct v4l2_querymenu menu = { .id = control.id, .index = index };
			struct v4l2_control set = { .id = control.id, .value = index };

			if (!ioctl(fd, VIDIOC_QUERYMENU, &menu) &&
			    !strncmp((char *)menu.name, choice, strlen(choice)) &&
			    !ioctl(fd, VIDIOC_S_CTRL, &set))
				return;
		}
		usleep(10000);
	}
	errx(1, "control %s has no choice %s", name, choice);
}

/* The same format for output and input, so that frames are copied and not converted. */
static void set_format(int fd, enum v4l2_buf_type type)
{
	struct v4l2_format format = { .type = type };
	struct v4l2_pix_format *pix = &format.fmt.pix;

	pix->width = WIDTH;
	pix->height = HEIGHT;
	pix->pixelformat = V4L2_PIX_FMT_XRGB32;
	pix->field = V4L2_FIELD_NONE;
	pix->colorspace = V4L2_COLORSPACE_SRGB;
	xioctl(fd, VIDIOC_S_FMT, &format, "VIDIOC_S_FMT");
	if (pix->width != WIDTH || pix->height != HEIGHT || pix->sizeimage != FRAME)
		errx(1, "a frame of %u x %u, %u bytes", pix->width, pix->height, pix->sizeimage);
}

static void find(int fd, unsigned long enumerate, unsigned long set, const char *name)
{
	for (int index = 0; index < 16; index++) {
		/* The members used here are at the same offsets in inputs and outputs. */
		union {
			struct v4l2_input	input;
			struct v4l2_output	output;
		} one = { .input.index = index };

		if (!ioctl(fd, enumerate, &one) && !strncmp((char *)one.input.name, name, strlen(name))) {
			xioctl(fd, set, &index, name);
			return;
		}
	}
	errx(1, "no %s", name);
}

static void queue(int fd, enum v4l2_buf_type type, enum v4l2_memory memory, int index, int dma_buf)
{
	struct v4l2_buffer buffer = { .type = type, .memory = memory, .index = index, .field = V4L2_FIELD_NONE };

	if (memory == V4L2_MEMORY_DMABUF)
		buffer.m.fd = dma_buf;
	if (type == V4L2_BUF_TYPE_VIDEO_OUTPUT) {
		buffer.bytesused = FRAME;
		buffer.length = lseek(dma_buf, 0, SEEK_END);
	}
	xioctl(fd, VIDIOC_QBUF, &buffer, "VIDIOC_QBUF");
}

static void vivid(void)
{
	const enum v4l2_buf_type in = V4L2_BUF_TYPE_VIDEO_CAPTURE, out = V4L2_BUF_TYPE_VIDEO_OUTPUT;
	struct v4l2_requestbuffers want = { .count = 2 };
	struct v4l2_buffer buffer = { .type = in, .memory = V4L2_MEMORY_MMAP };
	int source = inherited(), input, output;
	void *map;

	input = video(V4L2_CAP_VIDEO_CAPTURE);
	output = video(V4L2_CAP_VIDEO_OUTPUT);
	find(output, VIDIOC_ENUMOUTPUT, VIDIOC_S_OUTPUT, "HDMI");
	find(input, VIDIOC_ENUMINPUT, VIDIOC_S_INPUT, "HDMI");
	choose(input, "OSD Text Mode", "None");
	set_format(output, out);
	set_format(input, in);

	want.type = out;
	want.memory = V4L2_MEMORY_DMABUF;
	xioctl(output, VIDIOC_REQBUFS, &want, "VIDIOC_REQBUFS");
	want.type = in;
	want.memory = V4L2_MEMORY_MMAP;
	xioctl(input, VIDIOC_REQBUFS, &want, "VIDIOC_REQBUFS");
	/* Both buffers of the output are the same dma-buf, so that each frame shows it. */
	queue(output, out, V4L2_MEMORY_DMABUF, 0, source);
	queue(output, out, V4L2_MEMORY_DMABUF, 1, source);
	xioctl(output, VIDIOC_STREAMON, (void *)&out, "VIDIOC_STREAMON");
	/*
	 * Connecting them starts a worker of vivid, which may check too early and undo the connection: then the frame
	 * is a test pattern. If the connection still exists after a frame, it existed during the frame.
	 */
	for (int tries = 0;; tries++) {
		choose(input, CABLE, "Output HDMI 000-0");
		queue(input, in, V4L2_MEMORY_MMAP, 0, -1);
		queue(input, in, V4L2_MEMORY_MMAP, 1, -1);
		xioctl(input, VIDIOC_STREAMON, (void *)&in, "VIDIOC_STREAMON");
		xioctl(input, VIDIOC_DQBUF, &buffer, "VIDIOC_DQBUF");
		if (chosen(input, CABLE, "Output HDMI 000-0"))
			break;
		if (tries == 100)
			errx(1, "the connection of vivid does not last");
		xioctl(input, VIDIOC_STREAMOFF, (void *)&in, "VIDIOC_STREAMOFF");
	}
	map = mmap(NULL, buffer.length, PROT_READ, MAP_SHARED, input, buffer.m.offset);
	if (map == MAP_FAILED)
		err(1, "mmap");
	write_all(map, FRAME);
}

/* Sent with one byte of text, because a descriptor cannot be sent alone. */
union message {
	char		space[CMSG_SPACE(sizeof(int))];
	struct cmsghdr	header;
};

static void send_on(char **words)
{
	union message control = { .header = { .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
					      .cmsg_len = CMSG_LEN(sizeof(int)) } };
	struct iovec text = { .iov_base = "", .iov_len = 1 };
	struct msghdr message = { .msg_iov = &text, .msg_iovlen = 1, .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	int fd = inherited(), pair[2], status;
	pid_t child;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		err(1, "socketpair");
	child = fork();
	if (child < 0)
		err(1, "fork");
	if (!child) {
		/* The program must find the bytes by the dma-buf only. */
		dup2(pair[1], STDIN_FILENO);
		close_range(3, ~0U, 0);
		clearenv();
		execv(words[0], words);
		err(127, "%s", words[0]);
	}
	close(pair[1]);
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	if (sendmsg(pair[0], &message, 0) != 1)
		err(1, "sendmsg");
	close(fd);
	if (waitpid(child, &status, 0) != child || status)
		errx(1, "the receiver failed");
}

static void receive(void)
{
	union message control;
	char byte;
	struct iovec text = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr message = { .msg_iov = &text, .msg_iovlen = 1, .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	off_t size;
	void *map;
	int fd;

	if (recvmsg(STDIN_FILENO, &message, MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&message))
		err(1, "recvmsg");
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
	size = lseek(fd, 0, SEEK_END);
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		err(1, "mmap");
	write_all(map, size);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strcmp(what, "vgem"))
		vgem();
	else if (!strcmp(what, "vivid"))
		vivid();
	else if (!strcmp(what, "receive"))
		receive();
	else if (!strcmp(what, "send") && argc > 2)
		send_on(argv + 2);
	else
		errx(2, "importer vgem|vivid|receive|send COMMAND...");
	return 0;
}
