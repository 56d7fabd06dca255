// SPDX-License-Identifier: GPL-2.0-only
/*
 * writes ROUNDS FOLDER...
 *
 * Runs in the machine, as root. It overwrites a cached file in each FOLDER with consecutive writes
 * of 64 and of 4096 bytes, WRITES (a macro set by the compiler's command line) between two marks
 * (vm/mark.h). Then it does the same without marks, and counts how often the kernel faults in the
 * source, and how often it copies. Output:
 *
 *	ran FOLDER BYTES			before each pair of marks
 *	touched FOLDER BYTES FAULTED COPIED	number of both calls during WRITES writes
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../vm/mark.h"

#define TRACING "/sys/kernel/tracing/"
#define LARGEST 4096

enum { BEGUN, DONE };

static const size_t sizes[] = { 64, LARGEST };
static char source[LARGEST];

static int try_put(const char *name, const char *text)
{
	int fd = open(name, O_WRONLY | O_CLOEXEC), done;

	if (fd < 0)
		err(1, "%s", name);
	done = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	close(fd);
	return done;
}

static void put(const char *name, const char *text)
{
	if (!try_put(name, text))
		err(1, "%s", name);
}

/* The number of hits of a probe. */
static unsigned long hits(const char *probe)
{
	FILE *file = fopen(TRACING "kprobe_profile", "r");
	unsigned long count;
	char name[64];

	if (!file)
		err(1, "kprobe_profile");
	while (fscanf(file, "%63s %lu %*u", name, &count) == 2) {
		if (!strcmp(name, probe)) {
			fclose(file);
			return count;
		}
	}
	errx(1, "no probe %s", probe);
}

static void overwrite(int fd, size_t bytes)
{
	int i;

	for (i = 0; i < WRITES; i++)
		if (pwrite(fd, source, bytes, i * bytes) != (ssize_t)bytes)
			err(1, "pwrite");
}

static int make(const char *folder)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/writes", folder);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		err(1, "%s", path);
	/* So that blocks and pages exist and are clean. */
	overwrite(fd, LARGEST);
	fsync(fd);
	return fd;
}

int main(int argc, char **argv)
{
	int rounds, round, i, fd;
	unsigned int j;

	if (argc < 3)
		errx(2, "writes ROUNDS FOLDER...");
	rounds = atoi(argv[1]);
	memset(source, 'w', sizeof(source));
	for (i = 2; i < argc; i++) {
		fd = make(argv[i]);
		for (j = 0; j < 2; j++) {
			for (round = 0; round <= rounds; round++) {
				/* Makes all pages dirty; the first round is a warm-up. */
				overwrite(fd, sizes[j]);
				if (round)
					printf("ran %s %zu\n", argv[i], sizes[j]);
				if (round)
					mark(BEGUN);
				overwrite(fd, sizes[j]);
				if (round)
					mark(DONE);
			}
		}
		close(fd);
	}
	put(TRACING "kprobe_events", "p:faulted fault_in_iov_iter_readable\n");
	/* Older kernels have only the second one. */
	if (!try_put(TRACING "kprobe_events", "p:copied copy_folio_from_iter_atomic\n"))
		put(TRACING "kprobe_events", "p:copied copy_page_from_iter_atomic\n");
	put(TRACING "events/kprobes/enable", "1");
	for (i = 2; i < argc; i++) {
		fd = make(argv[i]);
		for (j = 0; j < 2; j++) {
			unsigned long faulted = hits("faulted"), copied = hits("copied");

			overwrite(fd, sizes[j]);
			faulted = hits("faulted") - faulted;
			copied = hits("copied") - copied;
			printf("touched %s %zu %lu %lu\n", argv[i], sizes[j], faulted, copied);
		}
		close(fd);
	}
	return 0;
}
