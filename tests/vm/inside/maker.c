/*
 * maker KIND SIZE FD COMMAND...   makes memory of a KIND (memfd, udmabuf, heap:NAME, module), filled with SENTINEL, as
 * descriptor FD, and executes COMMAND: the existing memory of a load to `fd:FD`.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../../kernel/uapi/dmafile.h"

#define SENTINEL 0xa5

static int memfd(size_t size)
{
	int fd = memfd_create("maker", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		err(1, "memfd");
	return fd;
}

static int udmabuf(size_t size)
{
	struct udmabuf_create create = { .memfd = memfd(size), .flags = UDMABUF_FLAGS_CLOEXEC, .size = size };
	int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	int fd = ioctl(node, UDMABUF_CREATE, &create);

	if (fd < 0)
		err(1, "/dev/udmabuf");
	return fd;
}

static int heap(const char *name, size_t size)
{
	struct dma_heap_allocation_data data = { .len = size, .fd_flags = O_RDWR | O_CLOEXEC };
	char path[64];
	int node;

	snprintf(path, sizeof(path), "/dev/dma_heap/%s", name);
	node = open(path, O_RDONLY | O_CLOEXEC);
	if (ioctl(node, DMA_HEAP_IOCTL_ALLOC, &data))
		err(1, "%s", path);
	return data.fd;
}

static int module(size_t size)
{
	struct dmafile_alloc alloc = { .size = sizeof(alloc), .fd_flags = O_RDWR | O_CLOEXEC, .length = size };
	int node = open("/dev/dmafile", O_RDWR | O_CLOEXEC);

	if (ioctl(node, DMAFILE_IOC_ALLOC, &alloc))
		err(1, "/dev/dmafile");
	return alloc.fd;
}

int main(int argc, char **argv)
{
	size_t size;
	void *map;
	int fd;

	if (argc < 5)
		errx(1, "maker KIND SIZE FD COMMAND...");
	size = strtoull(argv[2], NULL, 10);
	if (!strcmp(argv[1], "memfd"))
		fd = memfd(size);
	else if (!strcmp(argv[1], "udmabuf"))
		fd = udmabuf(size);
	else if (!strcmp(argv[1], "module"))
		fd = module(size);
	else if (!strncmp(argv[1], "heap:", 5))
		fd = heap(argv[1] + 5, size);
	else
		errx(1, "no such kind: %s", argv[1]);
	map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		err(1, "mmap");
	memset(map, SENTINEL, size);
	munmap(map, size);
	/* COMMAND inherits the copy. */
	if (dup2(fd, atoi(argv[3])) < 0)
		err(1, "dup2");
	execv(argv[4], argv + 4);
	err(127, "%s", argv[4]);
}
