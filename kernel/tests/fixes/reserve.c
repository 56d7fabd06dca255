// SPDX-License-Identifier: GPL-2.0-only
/*
 * A bystander reserves huge pages with mmap(). Two threads make udmabufs of one hugetlb memfd at
 * the same time, and close them. All reservations of the bystander must be left.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define HUGE	(2UL << 20)
#define PAGES	16

static int device, memfd;
static unsigned int go, ready, refused;

static long pages(const char *format)
{
	FILE *file = fopen("/proc/meminfo", "r");
	char line[200];
	unsigned long number = -1;

	while (fgets(line, sizeof(line), file))
		if (sscanf(line, format, &number) == 1)
			break;
	fclose(file);
	return number;
}

static void *make(void *argument)
{
	struct udmabuf_create create = { .memfd = memfd, .size = PAGES * HUGE };
	int buffer;

	__atomic_add_fetch(&ready, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&go, __ATOMIC_ACQUIRE))
		sched_yield();
	buffer = ioctl(device, UDMABUF_CREATE, &create);
	if (buffer < 0)
		__atomic_add_fetch(&refused, 1, __ATOMIC_SEQ_CST);
	else
		close(buffer);
	return argument;
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 200, status;
	long before, after;
	FILE *file = fopen("/proc/sys/vm/nr_hugepages", "w");
	char *bystander;

	fprintf(file, "64");
	fclose(file);
	device = open("/dev/udmabuf", O_RDWR);
	bystander = mmap(NULL, PAGES * HUGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	if (device < 0 || bystander == MAP_FAILED) {
		perror("reserve");
		return 2;
	}
	before = pages("HugePages_Rsvd: %lu");
	while (rounds--) {
		pthread_t thread[2];
		int k;

		memfd = memfd_create("reserve", MFD_ALLOW_SEALING | MFD_HUGETLB);
		if (ftruncate(memfd, PAGES * HUGE) || fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
			return 2;
		go = 0;
		ready = 0;
		for (k = 0; k < 2; k++)
			pthread_create(&thread[k], NULL, make, NULL);
		while (__atomic_load_n(&ready, __ATOMIC_SEQ_CST) < 2)
			sched_yield();
		__atomic_store_n(&go, 1, __ATOMIC_RELEASE);
		for (k = 0; k < 2; k++)
			pthread_join(thread[k], NULL);
		close(memfd);
		if (pages("HugePages_Rsvd: %lu") != before)
			break;
	}
	after = pages("HugePages_Rsvd: %lu");
	printf("HugePages_Total %ld, Free %ld, Rsvd %ld, before %ld; %u calls failed\n",
	       pages("HugePages_Total: %lu"), pages("HugePages_Free: %lu"), after, before, refused);
	if (after == before && !refused)
		return 0;
	if (after < before) {
		/* Somebody else takes all that seems to be free. */
		size_t rest = (pages("HugePages_Free: %lu") - after) * HUGE;
		char *other = mmap(NULL, rest, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);

		if (other == MAP_FAILED)
			return 1;
		if (!fork()) {
			memset(bystander, 1, PAGES * HUGE);
			_exit(0);
		}
		wait(&status);
		printf("the owner of %d reserved huge pages writes to them: %s\n", PAGES,
		       WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "ok");
	}
	return 1;
}
