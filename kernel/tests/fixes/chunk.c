// SPDX-License-Identifier: GPL-2.0-only
/*
 * Writes 32 MiB to a new file, from memory that is present and from memory that is not, and prints
 * how many folios of which order the page cache allocated for it. Usage: chunk FILE
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fix.h"

#define SIZE	(32UL << 20)
#define TRACING	"/sys/kernel/tracing/"
#define EVENT	TRACING "events/filemap/mm_filemap_add_to_page_cache/"

static unsigned long count(const char *file, int present)
{
	unsigned long orders[16] = {}, all = 0;
	FILE *trace;
	char line[500], *at;
	void *source;
	int fd, order, zero;

	unlink(file);
	fd = open(file, O_CREAT | O_RDWR, 0600);
	source = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise(source, SIZE, MADV_NOHUGEPAGE);
	if (present)
		memset(source, 1, SIZE);
	set(TRACING "trace", "");
	set(EVENT "enable", "1");
	zero = write(fd, source, SIZE) != SIZE;
	set(EVENT "enable", "0");
	if (zero)
		printf("short write\n");
	trace = fopen(TRACING "trace", "r");
	while (fgets(line, sizeof(line), trace)) {
		at = strstr(line, "order=");
		if (at && sscanf(at, "order=%d", &order) == 1 && order < 16) {
			orders[order]++;
			all++;
		}
	}
	fclose(trace);
	printf("source %s: %lu folios:", present ? "present" : "absent ", all);
	for (order = 0; order < 16; order++)
		if (orders[order])
			printf(" %lu of order %d", orders[order], order);
	printf("\n");
	close(fd);
	munmap(source, SIZE);
	return all;
}

int main(int argc, char **argv)
{
	unsigned long present, absent;

	if (argc < 2)
		return 2;
	set(TRACING "buffer_size_kb", "8192");
	present = count(argv[1], 1);
	absent = count(argv[1], 0);
	return absent > 4 * present;
}
