/*
 * reader [FILE]   the COMMAND of a load: a program that only uses the environment that dmafile sets.
 *
 * Prints one line with the number of cached pages of FILE, the number of reserved huge pages, and the kind and size of
 * each descriptor; then the bytes of all descriptors, read through mappings. The test compares them. This is a static C
 * program, because in an emulated machine, starting a larger one takes longer than the load.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "write_all.h"

/* mincore(), not cachestat(): a mapping of an overlayfs file is one of the real file, which has the pages. */
static size_t cached(const char *path)
{
	size_t page = sysconf(_SC_PAGESIZE), pages, count = 0;
	unsigned char *present;
	struct stat stat;
	void *map;
	int fd;

	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &stat))
		err(1, "%s", path);
	if (!stat.st_size)
		return 0;
	map = mmap(NULL, stat.st_size, PROT_READ, MAP_SHARED, fd, 0);
	pages = (stat.st_size + page - 1) / page;
	present = malloc(pages);
	if (map == MAP_FAILED || !present || mincore(map, stat.st_size, present))
		err(1, "%s", path);
	for (size_t i = 0; i < pages; i++)
		count += present[i] & 1;
	munmap(map, stat.st_size);
	free(present);
	close(fd);
	return count;
}

static unsigned long reserved(void)
{
	unsigned long count = 0;
	char line[128];
	FILE *file = fopen("/proc/meminfo", "re");

	if (!file)
		err(1, "/proc/meminfo");
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "HugePages_Rsvd: %lu", &count) == 1)
			break;
	fclose(file);
	return count;
}

/* The link of a descriptor in /proc begins with its kind. */
static int is_dma_buf(int fd)
{
	char path[32], link[8] = "";

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (readlink(path, link, sizeof(link)) < 0)
		err(1, "%s", path);
	return !memcmp(link, "/dmabuf:", sizeof(link));
}

static void sync_cpu(int fd, uint64_t flags)
{
	struct dma_buf_sync sync = { .flags = DMA_BUF_SYNC_READ | flags };

	if (is_dma_buf(fd) && ioctl(fd, DMA_BUF_IOCTL_SYNC, &sync))
		err(1, "DMA_BUF_IOCTL_SYNC");
}

int main(int argc, char **argv)
{
	char *list = getenv("DMAFILE_FD"), *word, *next;
	char line[4096];
	int length;

	if (!list)
		errx(1, "no DMAFILE_FD");
	length = snprintf(line, sizeof(line), "%zu %lu", argc > 1 ? cached(argv[1]) : 0, reserved());
	for (word = list; *word; word = next + (*next == ',')) {
		int fd = strtol(word, &next, 10);

		if (length > (int)sizeof(line) - 64)
			errx(1, "too many descriptors");
		length += sprintf(line + length, " %s:%jd", is_dma_buf(fd) ? "dma-buf" : "memory",
				  (intmax_t)lseek(fd, 0, SEEK_END));
	}
	line[length++] = '\n';
	/* A larger pipe needs fewer context switches; if it is refused, this is only slower. */
	fcntl(STDOUT_FILENO, F_SETPIPE_SZ, 1 << 20);
	write_all(line, length);
	for (word = list; *word; word = next + (*next == ',')) {
		int fd = strtol(word, &next, 10);
		off_t size = lseek(fd, 0, SEEK_END);
		void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);

		if (map == MAP_FAILED)
			err(1, "mmap");
		sync_cpu(fd, DMA_BUF_SYNC_START);
		write_all(map, size);
		sync_cpu(fd, DMA_BUF_SYNC_END);
		munmap(map, size);
	}
	return 0;
}
