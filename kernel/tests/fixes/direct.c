// SPDX-License-Identifier: GPL-2.0-only
/* Reads a file on a file system that uses fs/direct-io.c. Usage: direct FILE */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fix.h"

#define SIZE	(4UL << 20)

int main(int argc, char **argv)
{
	long acquired, released;
	void *memory;
	int fd;

	if (argc < 2 || posix_memalign(&memory, 4096, SIZE))
		return 2;
	memset(memory, 1, SIZE);
	fd = open(argv[1], O_CREAT | O_RDWR, 0600);
	if (write(fd, memory, SIZE) != SIZE || fsync(fd))
		return 2;
	close(fd);
	acquired = value("/proc/vmstat", "nr_foll_pin_acquired %ld");
	released = value("/proc/vmstat", "nr_foll_pin_released %ld");
	fd = open(argv[1], O_RDONLY | O_DIRECT);
	if (read(fd, memory, SIZE) != SIZE)
		return 2;
	close(fd);
	acquired = value("/proc/vmstat", "nr_foll_pin_acquired %ld") - acquired;
	released = value("/proc/vmstat", "nr_foll_pin_released %ld") - released;
	printf("a direct read of %lu pages: %ld pins acquired, %ld released\n",
	       SIZE >> 12, acquired, released);
	/* Each CPU may keep some 100 back. */
	return labs(released - acquired) > 512;
}
