// SPDX-License-Identifier: GPL-2.0-only
/*
 * A task in a cgroup that may have 2 huge pages asks for 16 of a memfd, by fallocate() and by a
 * udmabuf. Must be started as root, with cgroup2 at /sys/fs/cgroup.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fix.h"

#define HUGE	(2UL << 20)
#define GROUP	"/sys/fs/cgroup/limit"

static void show(const char *path)
{
	char text[100] = "";
	int fd = open(path, O_RDONLY);

	if (read(fd, text, sizeof(text) - 1) > 0)
		printf("%s: %s", path, text);
	close(fd);
}

static int fresh(void)
{
	int fd = memfd_create("limit", MFD_ALLOW_SEALING | MFD_HUGETLB);

	if (ftruncate(fd, 16 * HUGE) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		perror("memfd");
	return fd;
}

int main(void)
{
	struct udmabuf_create create = { .size = 16 * HUGE };
	int device = open("/dev/udmabuf", O_RDWR), fd, buffer;
	char text[32];

	set("/proc/sys/vm/nr_hugepages", "64");
	set("/sys/fs/cgroup/cgroup.subtree_control", "+hugetlb");
	mkdir(GROUP, 0700);
	set(GROUP "/hugetlb.2MB.max", "4M");
	snprintf(text, sizeof(text), "%d", getpid());
	set(GROUP "/cgroup.procs", text);
	show(GROUP "/hugetlb.2MB.max");
	fd = fresh();
	if (fallocate(fd, 0, 0, 16 * HUGE))
		printf("fallocate() of 16 huge pages: %s\n", strerror(errno));
	else
		printf("fallocate() of 16 huge pages: done\n");
	show(GROUP "/hugetlb.2MB.current");
	close(fd);
	create.memfd = fresh();
	buffer = ioctl(device, UDMABUF_CREATE, &create);
	if (buffer < 0)
		printf("udmabuf of 16 huge pages: %s\n", strerror(errno));
	else
		printf("udmabuf of 16 huge pages: done\n");
	show(GROUP "/hugetlb.2MB.current");
	close(create.memfd);
	close(buffer);
	show(GROUP "/hugetlb.2MB.current");
	return buffer >= 0;
}
