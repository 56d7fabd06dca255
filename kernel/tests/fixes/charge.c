// SPDX-License-Identifier: GPL-2.0-only
/*
 * A task in a cgroup of 64 MiB makes udmabufs of one memfd of 16 MiB, and prints what they take.
 * Must be started as root, with cgroup2 at /sys/fs/cgroup.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fix.h"

#define SIZE	(16UL << 20)
#define GROUP	"/sys/fs/cgroup/charge"

static int fill(void)
{
	struct udmabuf_create create = { .size = SIZE };
	struct rlimit files = { 8192, 8192 };
	int device = open("/dev/udmabuf", O_RDWR), made = 0;
	long before, taken, charged;
	char text[32];

	setrlimit(RLIMIT_NOFILE, &files);
	set("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	mkdir(GROUP, 0700);
	set(GROUP "/memory.max", "64M");
	snprintf(text, sizeof(text), "%d", getpid());
	set(GROUP "/cgroup.procs", text);
	create.memfd = memfd_create("charge", MFD_ALLOW_SEALING);
	if (device < 0 || ftruncate(create.memfd, SIZE) || fallocate(create.memfd, 0, 0, SIZE) ||
	    fcntl(create.memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		return 2;
	before = value("/proc/meminfo", "MemAvailable: %ld");
	while (made < 4000 && ioctl(device, UDMABUF_CREATE, &create) >= 0)
		made++;
	if (made < 4000)
		printf("UDMABUF_CREATE: %s\n", strerror(errno));
	taken = before - value("/proc/meminfo", "MemAvailable: %ld");
	charged = value(GROUP "/memory.current", "%ld") >> 10;
	printf("%d udmabufs of the same 16 MiB: %ld KiB taken, %ld KiB charged, limit 65536\n",
	       made, taken, charged);
	return taken > 65536;
}

int main(void)
{
	int status;

	if (!fork()) {
		int failed = fill();

		fflush(stdout);
		_exit(failed);
	}
	wait(&status);
	if (WIFSIGNALED(status)) {
		printf("%s, because the limit of the cgroup was reached\n",
		       strsignal(WTERMSIG(status)));
		return 0;
	}
	return WEXITSTATUS(status);
}
