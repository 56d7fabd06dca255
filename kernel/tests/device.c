// SPDX-License-Identifier: GPL-2.0-only
/*
 * device FOLDER
 *
 * Tests what devices see of a dma-buf of the module, and what the CPU sees of data that they wrote.
 * The device is that of vm/testdev. With bounce buffers (swiotlb=force) a missing sync causes wrong
 * data. Without them, on processors with coherent caches, there is only one copy of all memory.
 */
#define _GNU_SOURCE
#include "test.h"
#include "vm/testdev/testdev.h"

#define LENGTH		(3 << 20)
/* The limit of a device without restrictions */
#define ANY_SEGMENT	0xffffffff
/* The maximum size of a bounce buffer */
#define BOUNCE		(256 << 10)

static const char *folder;
static char path[4096];
static bool bounced;
/* The expected contents of a buffer, and the contents that were read */
static __u8 shadow[LENGTH], seen[LENGTH];

static struct testdev_import import(int device, int fd, __u32 direction, __u32 max_segment)
{
	struct testdev_import request = {
		.fd = fd, .direction = direction, .max_segment = max_segment,
	};
	int result = call(device, TESTDEV_IMPORT, &request);

	must(!result, "a device that takes segments of %u bytes: %s", max_segment, why(result));
	return request;
}

static int open_device(void)
{
	int device = open("/dev/testdev", O_RDWR | O_CLOEXEC);

	must(device >= 0, "/dev/testdev: %s", strerror(errno));
	return device;
}

/* Opens a device that keeps the buffer mapped until it is closed. */
static int importer(int fd, __u32 direction)
{
	int device = open_device();

	import(device, fd, direction, ANY_SEGMENT);
	return device;
}

static void copy(int device, unsigned long request, int fd, __u8 *memory, bool to_buffer)
{
	struct testdev_copy copy = {
		.fd = fd,
		.to_buffer = to_buffer,
		.length = LENGTH,
		.address = (unsigned long)memory,
	};
	int result = call(device, request, &copy);

	must(!result, "testdev: %s", why(result));
}

static void check(const __u8 *bytes, const char *what)
{
	must(differ(bytes, shadow, LENGTH) == LENGTH, "%s: differs at %zu", what,
	     differ(bytes, shadow, LENGTH));
}

static void device_sees(int device, const char *what)
{
	copy(device, TESTDEV_DMA, -1, seen, false);
	check(seen, what);
}

static void cpu_sees(int fd, const char *what)
{
	__u8 *map = map_buffer(fd, PROT_READ);

	check(map, what);
	unmap_buffer(fd, map);
}

static void device_writes(int device, __u64 seed)
{
	fill(shadow, seed, 0, LENGTH);
	copy(device, TESTDEV_DMA, -1, shadow, true);
}

static void cpu_writes(int fd, __u64 seed)
{
	__u8 *map = map_buffer(fd, PROT_READ | PROT_WRITE);

	fill(shadow, seed, 0, LENGTH);
	memcpy(map, shadow, LENGTH);
	unmap_buffer(fd, map);
}

/* Transfers the whole file to the buffer, or back. */
static void rw(int fd, __u32 flags, bool direct)
{
	struct dmafile_rw rw = {
		.size = sizeof(rw),
		.flags = flags,
		.fd = fd,
		.file_fd = open(path, O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0)),
		.length = LENGTH,
	};
	int result;

	watch_dma(false);
	result = call(node, DMAFILE_IOC_RW, &rw);
	watch_dma(true);
	must(!result, "RW: %s", why(result));
	close(rw.file_fd);
}

static void write_file(__u64 seed)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	fill(shadow, seed, 0, LENGTH);
	must(fd >= 0 && write(fd, shadow, LENGTH) == LENGTH && !fsync(fd), "%s: %s", path,
	     strerror(errno));
	close(fd);
}

/* Segments are as long as the allocated chunks, but never longer than the device accepts. */
static void lengths(void)
{
	static const __u32 limits[] = { ANY_SEGMENT, 1 << 20, 64 << 10, 10000, PAGE };
	int fd = new_buffer(LENGTH), i;

	cpu_writes(fd, 1);
	for (i = 0; i < (int)ARRAY_SIZE(limits); i++) {
		__u32 want = limits[i] < 1 << 20 ? limits[i] / PAGE * PAGE : 1 << 20;
		int device = open_device();
		struct testdev_import got;

		if (bounced && want > BOUNCE)
			want = BOUNCE;
		got = import(device, fd, TESTDEV_READS, limits[i]);
		must(got.longest == want && got.segments >= LENGTH / want,
		     "limit %u: %u segments, of up to %u bytes", limits[i],
		     got.segments, got.longest);
		device_sees(device, "a mapping with other segments");
		close(device);
	}
	close(fd);
}

static void what_the_cpu_writes(void)
{
	int fd = new_buffer(LENGTH), before, reader, both;

	cpu_writes(fd, 2);
	before = importer(fd, TESTDEV_READS);
	device_sees(before, "data written before the mapping");
	reader = importer(fd, TESTDEV_READS);
	both = importer(fd, TESTDEV_BOTH);
	cpu_writes(fd, 3);
	device_sees(before, "the first of three");
	device_sees(reader, "the second of three");
	device_sees(both, "the third of three");
	close(before);
	close(reader);
	close(both);
	close(fd);
}

static void what_a_device_writes(void)
{
	int fd = new_buffer(LENGTH), reader, writer;

	cpu_writes(fd, 4);
	reader = importer(fd, TESTDEV_READS);
	writer = importer(fd, TESTDEV_WRITES);
	device_writes(writer, 5);
	cpu_sees(fd, "data written by a device");
	/* Its access has ended, so others can see the data. */
	device_sees(reader, "data written by another device");
	device_writes(writer, 6);
	close(writer);
	cpu_sees(fd, "data written by a closed device");
	close(reader);
	close(fd);
}

/*
 * Two devices are mapped for writing, but only one of them has written. Each bounce buffer has a
 * copy, and both are copied back, because the DMA API does not know which one is newer. The copy of
 * the device that was attached first wins. Without bounce buffers the written data is visible.
 */
static void two_that_may_write(void)
{
	static __u8 old[LENGTH];
	int fd, devices[2], turn;

	for (turn = 0; turn < 2; turn++) {
		__u8 *map;

		fd = new_buffer(LENGTH);
		cpu_writes(fd, 20 + turn);
		memcpy(old, shadow, LENGTH);
		devices[0] = importer(fd, TESTDEV_BOTH);
		devices[1] = importer(fd, TESTDEV_BOTH);
		device_writes(devices[turn], 30 + turn);
		map = map_buffer(fd, PROT_READ);
		if (bounced && turn)
			memcpy(shadow, old, LENGTH);
		check(map, turn ? "data of the second device" : "data of the first device");
		unmap_buffer(fd, map);
		close(devices[0]);
		close(devices[1]);
		close(fd);
	}
}

/* For devices, a request is a CPU access. */
static void what_requests_move(void)
{
	int fd = new_buffer(LENGTH), device, direct;

	for (direct = 0; direct < 2; direct++) {
		device = importer(fd, TESTDEV_BOTH);
		write_file(7 + direct);
		rw(fd, DMAFILE_READ, direct);
		device_sees(device, "data read from a file");
		cpu_sees(fd, "data read from a file, for the CPU");
		device_writes(device, 9 + direct);
		rw(fd, DMAFILE_WRITE, direct);
		close(device);
		/* Read without the module. */
		device = open(path, O_RDONLY | O_CLOEXEC);
		must(read(device, seen, LENGTH) == LENGTH, "%s: %s", path, strerror(errno));
		check(seen, "the file");
		close(device);
	}
	close(fd);
}

/* If waiting for a fence fails, the request returns this error. */
static void fence_that_fails(void)
{
	struct dmafile_rw request = {
		.size = sizeof(request),
		.flags = DMAFILE_WRITE,
		.fd = new_buffer(LENGTH),
		.file_fd = open(path, O_RDWR | O_CLOEXEC),
		.length = LENGTH,
	};
	int device = importer(request.fd, TESTDEV_BOTH), result;

	result = call(device, TESTDEV_FENCE, NULL);
	must(!result, "TESTDEV_FENCE: %s", why(result));
	result = call(node, DMAFILE_IOC_RW, &request);
	must(result == -EIO && !request.bytes, "RW after a failed fence: %s, %llu bytes",
	     why(result), request.bytes);
	close(device);
	/* The request has ended, and the buffer can be used again. */
	result = call(node, DMAFILE_IOC_RW, &request);
	must(!result, "RW: %s", why(result));
	close(request.file_fd);
	close(request.fd);
}

static void what_a_driver_maps(void)
{
	int fd = new_buffer(LENGTH), device = open_device();

	cpu_writes(fd, 11);
	copy(device, TESTDEV_VMAP, fd, seen, false);
	check(seen, "data read by a driver");
	fill(shadow, 12, 0, LENGTH);
	copy(device, TESTDEV_VMAP, fd, shadow, true);
	cpu_sees(fd, "data written by a driver");
	close(device);
	close(fd);
}

static void set_up(void)
{
	char line[4096] = "";
	FILE *words = fopen("/proc/cmdline", "re");

	must(words && fgets(line, sizeof(line), words), "/proc/cmdline: %s", strerror(errno));
	fclose(words);
	bounced = strstr(line, "swiotlb=force");
	snprintf(path, sizeof(path), "%s/device", folder);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "lengths", lengths },
	{ "what_the_cpu_writes", what_the_cpu_writes },
	{ "what_a_device_writes", what_a_device_writes },
	{ "two_that_may_write", two_that_may_write },
	{ "what_requests_move", what_requests_move },
	{ "fence_that_fails", fence_that_fails },
	{ "what_a_driver_maps", what_a_driver_maps },
};

int main(int argc, char **argv)
{
	folder = argc > 1 ? argv[1] : ".";
	return run_tests(tests, ARRAY_SIZE(tests));
}
