// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Receives an object by bare recv(2), to compare loads from stores with:
 *
 *     recv ADDRESS PORT PATH BYTES CONNECTIONS huge|base
 *
 * Blocks of 8 MiB, by HTTP range requests, over several connections with a thread each, into one mapping of a memfd.
 * Checks as little as possible. Prints one JSON object: seconds and CPU seconds, from before the memory is created until
 * all bytes are in it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BLOCK (8UL << 20)

static struct sockaddr_in server = { .sin_family = AF_INET };
static const char *path;
static size_t size;
static char *memory;
static atomic_size_t next;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static double cpu(void)
{
	struct rusage used;

	getrusage(RUSAGE_SELF, &used);
	return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

/* Sends a request, and puts what follows the head of the answer where it belongs. */
static void get(int fd, size_t at, size_t length)
{
	char head[4096], *body;
	size_t have = 0, got;
	ssize_t n;
	int words = snprintf(head, sizeof(head),
			     "GET %s HTTP/1.1\r\nHost: store\r\nRange: bytes=%zu-%zu\r\n\r\n",
			     path, at, at + length - 1);

	if (send(fd, head, words, 0) != words)
		err(1, "send");
	do {
		n = recv(fd, head + have, sizeof(head) - 1 - have, 0);
		if (n <= 0)
			err(1, "recv of a head");
		have += n;
		head[have] = 0;
		body = strstr(head, "\r\n\r\n");
	} while (!body && have < sizeof(head) - 1);
	if (!body || strncmp(head, "HTTP/1.1 206", 12))
		errx(1, "answer: %.60s", head);
	body += 4;
	got = have - (body - head);
	memcpy(memory + at, body, got);
	while (got < length) {
		n = recv(fd, memory + at + got, length - got, 0);
		if (n <= 0)
			err(1, "recv");
		got += n;
	}
}

static void *lane(void *unused)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	size_t at;

	if (fd < 0 || connect(fd, (struct sockaddr *)&server, sizeof(server)))
		err(1, "connect");
	while ((at = atomic_fetch_add(&next, BLOCK)) < size)
		get(fd, at, size - at < BLOCK ? size - at : BLOCK);
	close(fd);
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t threads[256];
	int count, huge, fd;
	size_t whole;
	double began, busy;

	if (argc != 7)
		errx(2, "recv ADDRESS PORT PATH BYTES CONNECTIONS huge|base");
	inet_pton(AF_INET, argv[1], &server.sin_addr);
	server.sin_port = htons(atoi(argv[2]));
	path = argv[3];
	size = strtoull(argv[4], NULL, 10);
	count = atoi(argv[5]);
	huge = !strcmp(argv[6], "huge");
	if (count < 1 || count > 256)
		errx(2, "1 to 256 connections");
	busy = cpu();
	began = now();
	fd = memfd_create("recv", MFD_CLOEXEC | (huge ? MFD_HUGETLB : 0));
	whole = (size + (2UL << 20) - 1) & ~((2UL << 20) - 1);
	if (fd < 0 || ftruncate(fd, whole))
		err(1, "memfd");
	memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		err(1, "mmap");
	for (int i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, lane, NULL))
			errx(1, "pthread_create");
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"peak\": %zu}\n", now() - began, cpu() - busy, whole);
	return 0;
}
