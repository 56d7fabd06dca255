/*
 * Fills memory from a file with each of the methods that are compared, without an interpreter in the measured process.
 *
 *	ways rounds FILE KIB ROUNDS SEED CANDIDATES
 *
 * runs in a machine that counts instructions, as root. It creates FILE, and runs each candidate in the list CANDIDATES
 * once per round, cold, in random order. Marks (../vm/mark.h) separate creating the memory, filling it and closing.
 *
 *	ways once FILE CANDIDATE [SAME]
 *
 * runs one candidate once, timed by the clock, with an existing FILE. The candidates:
 *
 *	load to=KIND ...	a load by dmafile, with its options pages, method, io, allocation, verify, block,
 *				chunk, queue-depth; it creates memory while it fills it
 *	copy to=anon pages=base|thp|huge method=read io=direct|buffered
 *				without dmafile: one read() into private memory
 *	copy to=memfd|u+mfd|udmabuf|heap method=read|sendfile|splice|copy-file-range io=direct|buffered
 *				without dmafile, in one call, into fresh 4 KiB pages; u+mfd is a memfd with a udmabuf
 *				on it; udmabuf is the same, filled through the dma-buf; with pages=thp tmpfs
 *				allocates huge pages
 *	copy to=heap method=heap-read|in-order io=direct|buffered
 *				by a heap that reads files (kernel/linux-6.12): during the allocation, or after it
 *	copy to=module method=alloc-read|rw|read io=direct|buffered
 *				by dmafile.ko: allocation and read in one call; into an existing dma-buf; by read()
 *				into the mapping of a dma-buf
 *	save from=heap|module|memfd method=write|copy-file-range|rw io=direct|buffered
 *				without dmafile: existing memory to the disk (fsync), `block` bytes per call, by
 *				default all in one; rw is by dmafile.ko. `rounds` writes to an existing file of that
 *				size, `once` to a new file, FILE.saved
 *	store from=heap|module|memfd ...
 *				a save by dmafile, with its options method, io, verify, block, queue-depth
 *	record from=memfd block=BYTES queue-depth=BUFFERS
 *				by a recorder of dmafile: records of BYTES from BUFFERS in turn, as many as fit in
 *				FILE, until it is finished; verify=none disables checksums; only with `once`
 *	make to=anon|memfd|heap|module|udmabuf|nothing pages=base|thp|huge
 *				only creates and closes; a udmabuf is made of an existing memfd; with
 *				method=fallocate a memfd's pages are allocated without being mapped
 *
 * With pool=made, huge pages are reserved when the memory is created and released when it is closed (for a save,
 * outside the measurement). Otherwise `rounds` reserves them in advance, zeroed.
 *
 * Output of `rounds`. A first round compares the bytes that were read and does not count:
 *
 *	ran INDEX ROUND		before each run's group of marks, in this order; a refused run has fewer marks; round 0
 *				is the one that compares bytes
 *	refused INDEX WHY	after its "ran"; it is not tried again
 *	report INDEX JSON	dmafile's report, once
 *
 * Output of `once`. With SAME, the bytes are compared with those of that file, outside the measurement:
 *
 *	create|fill|close SECONDS CPU_SECONDS
 *	report JSON		dmafile's report
 *	refused WHY		and nothing else
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <dmafile.h>

#include "../kernel/uapi/dma-heap-read-file.h"
#include "../kernel/uapi/dmafile.h"
#include "../vm/mark.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define IN_ORDER "/sys/module/dma_heap_read/parameters/in_order"
#define PAGE_LISTS "/proc/sys/vm/percpu_pagelist_high_fraction"
#define SHMEM_ENABLED "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

enum { START, CREATED, FILLED, CLOSED };

enum { MAX_CANDIDATES = 256 };
#define KIB (1UL << 10)
#define MIB (1UL << 20)
#define GIB (1UL << 30)
#define HUGE_PAGE (2 * MIB)

struct candidate {
	char line[256];
	char words[256];
	const char *verb;
	const char *to;
	const char *pages;
	const char *method;
	const char *io;
	const char *allocation;
	const char *pool;
	const char *verify;
	size_t block;
	size_t chunk;
	unsigned int queue_depth;
	bool refused;
};

/* The memory of `copy` and `make`; -1 and NULL mean that a member is not used. */
struct memory {
	int memfd;
	int dmabuf;
	unsigned char *map;
};

static struct candidate candidates[MAX_CANDIDATES];
static int number_of_candidates;
static const char *path;
static char saved_path[4096];
static size_t size;
static unsigned char *wanted;
static unsigned long huge_pages;
static char why[1024];
/* With `once`: when each step ended. */
static bool timed;
/* Whether the first mark of a run has been made. */
static bool begun;
static struct moment { double time, busy; } moments[CLOSED + 1];

static int refuse(const char *what)
{
	snprintf(why, sizeof(why), "%s: %s", what, strerror(errno));
	return -1;
}

static bool is(const char *word, const char *other)
{
	return word && !strcmp(word, other);
}

static int set(const char *parameter, const char *value)
{
	int fd = open(parameter, O_WRONLY | O_CLOEXEC), error;

	if (fd < 0)
		return refuse(parameter);
	error = write(fd, value, strlen(value)) < 0;
	close(fd);
	return error ? refuse(parameter) : 0;
}

static void note(int step)
{
	struct timespec now;
	struct rusage usage;

	begun = true;
	if (!timed)
		return;
	clock_gettime(CLOCK_MONOTONIC, &now);
	getrusage(RUSAGE_SELF, &usage);
	moments[step].time = now.tv_sec + now.tv_nsec / 1e9;
	moments[step].busy = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
			     (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* A step has ended, or the first one begins. */
#define reached(step)                                                                                                  \
	do {                                                                                                           \
		mark(step);                                                                                            \
		note(step);                                                                                            \
	} while (0)

/* Waits for deferred work, such as freeing a ring, so that it counts for the run that caused it. */
static void settle(void)
{
	if (!timed)
		usleep(50000);
}

/* The file */

static void write_whole(int fd, const unsigned char *bytes)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = write(fd, bytes + done, size - done);

		if (n < 0)
			err(1, "write");
		done += n;
	}
}

/* A file that the save overwrites. */
static void make_place(void)
{
	int fd = open(saved_path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
	void *zeros = calloc(1, size);

	if (fd < 0 || !zeros)
		err(1, "%s", saved_path);
	write_whole(fd, zeros);
	free(zeros);
	if (fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) || close(fd))
		err(1, "%s", saved_path);
}

/* Random bytes, so that misplaced ones are found. */
static void make_file(void)
{
	uint64_t noise = 88172645463325252, *word;
	int fd;

	wanted = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (wanted == MAP_FAILED)
		err(1, "mmap");
	for (word = (uint64_t *)wanted; word < (uint64_t *)(wanted + size); word++) {
		noise ^= noise << 13;
		noise ^= noise >> 7;
		noise ^= noise << 17;
		*word = noise;
	}
	fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
	if (fd < 0)
		err(1, "%s", path);
	/* The blocks of a disk exist already. */
	errno = posix_fallocate(fd, 0, size);
	if (errno && errno != ENODEV)
		err(1, "%s", path);
	write_whole(fd, wanted);
	if (fsync(fd) || close(fd))
		err(1, "%s", path);
}

static size_t cached(int fd)
{
	static unsigned char pages[1 << 20];
	void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	size_t number = 0, i;

	if (map == MAP_FAILED || size / 4096 > sizeof(pages) || mincore(map, size, pages))
		err(1, "mincore");
	munmap(map, size);
	for (i = 0; i < size / 4096; i++)
		number += pages[i] & 1;
	return number;
}

static void evict(void)
{
	int fd = open(path, O_RDONLY), i;

	if (fd < 0)
		err(1, "%s", path);
	/* Pages on per-CPU lists of the kernel may need another call. */
	for (i = 0; posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) || cached(fd); i++) {
		if (i == 20)
			errx(1, "%s stays in the page cache", path);
		usleep(50000);
	}
	close(fd);
}

static void expect_none_cached(const struct candidate *c)
{
	bool saves = is(c->verb, "save") || is(c->verb, "store");
	int fd = open(saves ? saved_path : path, O_RDONLY);
	size_t number = fd < 0 ? 0 : cached(fd);

	if (fd < 0 || number)
		errx(1, "%s: %zu pages are in the page cache", c->line, number);
	close(fd);
}

/* By dmafile */

static int check_load(const struct dmafile_buffer *buffer)
{
	static unsigned char chunk[1 << 20];
	size_t at;

	for (at = 0; at < size; at += sizeof(chunk)) {
		size_t len = size - at < sizeof(chunk) ? size - at : sizeof(chunk);

		if (dmafile_buffer_read_at(buffer, at, chunk, len) || memcmp(chunk, wanted + at, len))
			return -1;
	}
	return 0;
}

static const char pool_node[] = "/proc/sys/vm/nr_hugepages";

/* Asks for a pool of PAGES huge pages; returns how many there are afterwards. */
static unsigned long ask_pool(unsigned long pages)
{
	FILE *file = fopen(pool_node, "r+");
	unsigned long there = -1;

	if (!file || fprintf(file, "%lu\n", pages) < 0 || fflush(file))
		err(1, "%s", pool_node);
	rewind(file);
	if (fscanf(file, "%lu", &there) != 1)
		err(1, "%s", pool_node);
	fclose(file);
	return there;
}

/* Sets the pool of huge pages; an error if the kernel cannot. */
static void set_pool(unsigned long pages)
{
	unsigned long there = ask_pool(pages);

	if (there != pages)
		errx(1, "%s: the kernel reserved %lu huge pages, not %lu", pool_node, there, pages);
}

/* Adds huge pages for FILE to the pool if the candidate asks for it; BEFORE is the old number. */
static int add_pool(const struct candidate *c, unsigned long *before)
{
	unsigned long wanted;
	FILE *file;

	if (!is(c->pool, "made"))
		return 0;
	file = fopen(pool_node, "r+");
	if (!file || fscanf(file, "%lu", before) != 1)
		return refuse(pool_node);
	fclose(file);
	wanted = *before + size / HUGE_PAGE;
	if (ask_pool(wanted) == wanted)
		return 0;
	/* Memory is fragmented. */
	set_pool(*before);
	errno = ENOMEM;
	return refuse(pool_node);
}

static int run_load(const struct candidate *c, bool check)
{
	struct dmafile_options options = {
		.size = sizeof(options),
		.to = c->to,
		.pages = c->pages,
		.method = c->method,
		.io = c->io,
		.allocation = c->allocation,
		.verify = c->verify,
		.chunk = c->chunk,
		.block = c->block,
		.queue_depth = c->queue_depth,
	};
	struct dmafile_buffer *buffer;
	int error;

	bool pool = is(c->pool, "made");

	if (pool)
		set_pool(0);
	settle();
	reached(START);
	if (pool)
		/* One more page than the file needs, as in all pools here. */
		set_pool(size / HUGE_PAGE + 1);
	reached(CREATED);
	error = dmafile_load(path, &options, &buffer);
	reached(FILLED);
	if (error) {
		dmafile_strerror_r(why, sizeof(why));
		return -1;
	}
	if (check && check_load(buffer))
		errx(1, "%s: wrong bytes", c->line);
	if (timed)
		printf("report %s\n", dmafile_buffer_report_json(buffer));
	else if (check)
		printf("report %td %s\n", c - candidates, dmafile_buffer_report_json(buffer));
	dmafile_buffer_free(buffer);
	if (pool)
		set_pool(0);
	settle();
	reached(CLOSED);
	if (pool)
		set_pool(huge_pages);
	return 0;
}

/* Memory */

/* Maps memory at an address that is aligned to huge pages. */
static unsigned char *map_aligned(int fd, int flags)
{
	unsigned char *place = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *map;
	size_t before;

	if (place == MAP_FAILED)
		return NULL;
	before = -(uintptr_t)place % HUGE_PAGE;
	map = mmap(place + before, size, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
	munmap(place + before + size, HUGE_PAGE - before);
	if (before)
		munmap(place, before);
	return map == MAP_FAILED ? NULL : map;
}

static int populate(unsigned char *map, bool collapse)
{
	size_t at;

	/* Only this makes shared pages huge without privilege; it needs pages that are present. */
	for (at = 0; collapse && at < size; at += HUGE_PAGE)
		map[at] = 0;
	return madvise(map, size, collapse ? MADV_COLLAPSE : MADV_POPULATE_WRITE) ? refuse("madvise") : 0;
}

static int map_anon(const struct candidate *c, struct memory *m)
{
	int huge = is(c->pages, "huge") ? MAP_HUGETLB : 0;

	m->map = map_aligned(-1, MAP_PRIVATE | MAP_ANONYMOUS | huge);
	if (!m->map)
		return refuse("mmap");
	if (!huge && madvise(m->map, size, is(c->pages, "thp") ? MADV_HUGEPAGE : MADV_NOHUGEPAGE))
		return refuse("madvise");
	return 0;
}

static int make_memfd(const struct candidate *c, struct memory *m)
{
	int huge = is(c->pages, "huge") ? MFD_HUGETLB : 0;

	m->memfd = memfd_create("loads", MFD_ALLOW_SEALING | huge);
	if (m->memfd < 0 || ftruncate(m->memfd, size) || fcntl(m->memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		return refuse("memfd_create");
	return 0;
}

static int map_memfd(struct memory *m)
{
	m->map = map_aligned(m->memfd, MAP_SHARED);
	return m->map ? 0 : refuse("mmap");
}

static int make_udmabuf(struct memory *m)
{
	struct udmabuf_create create = { .memfd = m->memfd, .flags = UDMABUF_FLAGS_CLOEXEC, .size = size };
	int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);

	if (node < 0)
		return refuse("/dev/udmabuf");
	m->dmabuf = ioctl(node, UDMABUF_CREATE, &create);
	if (m->dmabuf < 0)
		return refuse("UDMABUF_CREATE");
	close(node);
	return 0;
}

/* A buffer of LEN bytes; with the flag, LEN is a file descriptor and the buffer gets its contents. */
static int allocate(struct memory *m, __u64 len, __u64 flags)
{
	struct dma_heap_allocation_data data = {
		.len = len, .fd_flags = O_RDWR | O_CLOEXEC, .heap_flags = flags,
	};
	int heap = open("/dev/dma_heap/system", O_RDONLY | O_CLOEXEC);

	if (heap < 0 || ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data))
		return refuse(flags ? "DMA_HEAP_ALLOC_AND_READ_FILE" : "/dev/dma_heap/system");
	m->dmabuf = data.fd;
	close(heap);
	return 0;
}

static int make_heap(struct memory *m)
{
	return allocate(m, size, 0);
}

static int open_module(void)
{
	return open("/dev/dmafile", O_RDWR | O_CLOEXEC);
}

static int make_module(struct memory *m)
{
	struct dmafile_alloc alloc = { .size = sizeof(alloc), .fd_flags = O_RDWR | O_CLOEXEC, .length = size };
	int node = open_module();

	if (node < 0 || ioctl(node, DMAFILE_IOC_ALLOC, &alloc))
		return refuse("/dev/dmafile");
	m->dmabuf = alloc.fd;
	close(node);
	return 0;
}

static int map_dmabuf(struct memory *m)
{
	m->map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, m->dmabuf, 0);
	if (m->map == MAP_FAILED)
		m->map = NULL;
	return m->map ? 0 : refuse("mmap of the dma-buf");
}

static void close_memory(struct memory *m)
{
	if (m->map)
		munmap(m->map, size);
	if (m->dmabuf >= 0)
		close(m->dmabuf);
	if (m->memfd >= 0)
		close(m->memfd);
}

/* Only creation */

static int create_alone(const struct candidate *c, struct memory *m)
{
	if (is(c->to, "anon"))
		return map_anon(c, m) || populate(m->map, false) ? -1 : 0;
	if (is(c->to, "memfd") && is(c->method, "fallocate"))
		return make_memfd(c, m) || (fallocate(m->memfd, 0, 0, size) && refuse("fallocate")) ? -1 : 0;
	if (is(c->to, "memfd"))
		return make_memfd(c, m) || map_memfd(m) || populate(m->map, is(c->pages, "thp")) ? -1 : 0;
	if (is(c->to, "heap"))
		return make_heap(m) || map_dmabuf(m) ? -1 : 0;
	if (is(c->to, "module"))
		return make_module(m);
	if (is(c->to, "udmabuf"))
		return make_udmabuf(m);
	if (is(c->to, "nothing"))
		return 0;
	errx(1, "%s: unknown kind of memory", c->line);
}

static int run_make(const struct candidate *c)
{
	struct memory m = { -1, -1, NULL }, under = { -1, -1, NULL };
	int error = 0;

	if (is(c->to, "udmabuf")) {
		error = make_memfd(c, &under) || map_memfd(&under) || populate(under.map, is(c->pages, "thp"));
		m.memfd = under.memfd;
		under.memfd = -1;
	}
	settle();
	reached(START);
	error = error || create_alone(c, &m);
	reached(CREATED);
	reached(FILLED);
	if (!error) {
		if (is(c->to, "udmabuf")) {
			/* Closes the dma-buf without its memory. */
			close(m.dmabuf);
			m.dmabuf = -1;
		} else {
			close_memory(&m);
			m = (struct memory){ -1, -1, NULL };
		}
		settle();
		reached(CLOSED);
	}
	close_memory(&m);
	close_memory(&under);
	return error ? -1 : 0;
}

/* Without dmafile */

static bool by_heap(const struct candidate *c)
{
	return is(c->method, "heap-read") || is(c->method, "in-order");
}

static int create_to_fill(const struct candidate *c, struct memory *m)
{
	bool maps = is(c->method, "read");

	if (by_heap(c))
		return 0;
	if (is(c->to, "anon"))
		return map_anon(c, m);
	if (is(c->to, "heap"))
		return make_heap(m) || (maps && map_dmabuf(m)) ? -1 : 0;
	if (is(c->to, "module")) {
		/* A fused load creates memory while filling it. */
		if (is(c->method, "alloc-read"))
			return 0;
		return make_module(m) || (maps && map_dmabuf(m)) ? -1 : 0;
	}
	if (make_memfd(c, m) || (!is(c->to, "memfd") && make_udmabuf(m)))
		return -1;
	if (is(c->to, "udmabuf"))
		return maps ? map_dmabuf(m) : 0;
	return maps ? map_memfd(m) : 0;
}

/* Moves up to one pipe's capacity. */
static ssize_t splice_on(int in, int pipes[2], int out, size_t len)
{
	ssize_t came = splice(in, NULL, pipes[1], NULL, len, 0), left = came;

	while (left > 0) {
		ssize_t gone = splice(pipes[0], NULL, out, NULL, left, 0);

		if (gone <= 0)
			return -1;
		left -= gone;
	}
	return came;
}

/* In one call, by dmafile.ko. */
static int fill_by_module(const struct candidate *c, struct memory *m, int in)
{
	int node = open_module(), error;

	if (node < 0)
		return refuse("/dev/dmafile");
	if (is(c->method, "rw")) {
		struct dmafile_rw rw = {
			.size = sizeof(rw), .flags = DMAFILE_READ, .fd = m->dmabuf, .file_fd = in, .length = size,
		};

		error = ioctl(node, DMAFILE_IOC_RW, &rw);
	} else {
		struct dmafile_alloc_read read = { .size = sizeof(read), .fd_flags = O_RDWR | O_CLOEXEC, .file_fd = in };

		error = ioctl(node, DMAFILE_IOC_ALLOC_READ, &read);
		if (!error)
			m->dmabuf = read.fd;
	}
	close(node);
	return error ? refuse(c->method) : 0;
}

static int fill(const struct candidate *c, struct memory *m, int in, int pipes[2])
{
	/* The target is the dma-buf, unless there is a memfd and the target is not `udmabuf`. */
	int out = m->memfd >= 0 && !is(c->to, "udmabuf") ? m->memfd : m->dmabuf;
	size_t done = 0;
	ssize_t n;

	if (is(c->method, "rw") || is(c->method, "alloc-read"))
		return fill_by_module(c, m, in);
	if (by_heap(c))
		return allocate(m, in, DMA_HEAP_ALLOC_AND_READ_FILE);
	while (done < size) {
		size_t len = size - done;

		if (is(c->method, "read"))
			n = read(in, m->map + done, len);
		else if (is(c->method, "sendfile"))
			n = sendfile(out, in, NULL, len);
		else if (is(c->method, "splice"))
			n = splice_on(in, pipes, out, len);
		else if (is(c->method, "copy-file-range"))
			n = copy_file_range(in, NULL, out, NULL, len, 0);
		else
			errx(1, "%s: unknown method", c->line);
		if (n <= 0)
			return refuse(c->method);
		done += n;
	}
	return 0;
}

static int run_copy(const struct candidate *c, bool check)
{
	struct memory m = { -1, -1, NULL };
	int in, pipes[2] = { -1, -1 }, error;
	bool thp = is(c->pages, "thp") && !is(c->to, "anon");

	/* Selects whether the heap allocates everything before it reads. */
	if (by_heap(c) && set(IN_ORDER, is(c->method, "in-order") ? "Y" : "N"))
		return -1;
	if (thp && set(SHMEM_ENABLED, "always"))
		return -1;
	settle();
	reached(START);
	error = create_to_fill(c, &m);
	reached(CREATED);
	if (!error) {
		in = open(path, O_RDONLY | O_CLOEXEC | (is(c->io, "direct") ? O_DIRECT : 0));
		if (in < 0 || (is(c->method, "splice") && pipe2(pipes, O_CLOEXEC)) ||
		    (pipes[1] >= 0 && fcntl(pipes[1], F_SETPIPE_SZ, MIB) < 0))
			err(1, "%s", c->line);
		error = fill(c, &m, in, pipes);
		if (pipes[0] >= 0)
			close(pipes[0]);
		if (pipes[1] >= 0)
			close(pipes[1]);
		close(in);
	}
	reached(FILLED);
	if (!error && check) {
		if (!m.map && (m.memfd >= 0 ? map_memfd(&m) : map_dmabuf(&m)))
			errx(1, "%s: %s", c->line, why);
		if (memcmp(m.map, wanted, size))
			errx(1, "%s: wrong bytes", c->line);
	}
	close_memory(&m);
	if (!error) {
		settle();
		reached(CLOSED);
	}
	if (thp && set(SHMEM_ENABLED, "never"))
		return -1;
	return error;
}

/* Compares what is on the disk, by direct reads, which leave nothing in the page cache. */
static void check_saved(const struct candidate *c)
{
	void *seen = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = open(saved_path, O_RDONLY | O_DIRECT);
	size_t done = 0;
	ssize_t n;

	if (fd < 0 || seen == MAP_FAILED)
		err(1, "%s", saved_path);
	/* A call reads at most 2 GiB, and a direct read only whole blocks. */
	while (done < size && (n = read(fd, (char *)seen + done, size - done < GIB ? size - done : GIB)) > 0)
		done += n;
	if (done != size || memcmp(seen, wanted, size))
		errx(1, "%s: wrong bytes", c->line);
	munmap(seen, size);
	close(fd);
}

/* The source of a save: FILE's bytes in memory. */
static int make_source(const struct candidate *c, struct memory *m)
{
	size_t done = 0;
	ssize_t n;
	int in;

	if (is(c->to, "memfd")) {
		if (make_memfd(c, m) || map_memfd(m) || populate(m->map, is(c->pages, "thp")))
			return -1;
	} else if ((is(c->to, "module") ? make_module(m) : make_heap(m)) || map_dmabuf(m)) {
		return -1;
	}
	if (!timed) {
		memcpy(m->map, wanted, size);
		return 0;
	}
	in = open(path, O_RDONLY | O_CLOEXEC | (m->memfd >= 0 ? O_DIRECT : 0));
	for (; in >= 0 && done < size; done += n) {
		n = read(in, m->map + done, size - done);
		if (n <= 0)
			err(1, "%s", path);
	}
	return in < 0 || close(in) ? refuse(path) : 0;
}

static int save_by_module(const struct memory *m, int out)
{
	struct dmafile_rw rw = {
		.size = sizeof(rw), .flags = DMAFILE_WRITE, .fd = m->dmabuf, .file_fd = out, .length = size,
	};
	int node = open_module(), error = node < 0 || ioctl(node, DMAFILE_IOC_RW, &rw);

	if (node >= 0)
		close(node);
	return error ? refuse("rw") : 0;
}

static int save(const struct candidate *c, const struct memory *m)
{
	int direct = is(c->io, "direct") ? O_DIRECT : 0, error = 0;
	int out = open(saved_path, O_WRONLY | O_CLOEXEC | direct | (timed ? O_CREAT : 0), 0644);
	size_t done = 0;
	ssize_t n;

	if (out < 0)
		err(1, "%s", saved_path);
	if (is(c->method, "rw")) {
		error = save_by_module(m, out);
		done = size;
	}
	for (; done < size && !error; done += error ? 0 : n) {
		size_t len = c->block && c->block < size - done ? c->block : size - done;

		if (is(c->method, "write"))
			n = write(out, m->map + done, len);
		else
			n = copy_file_range(m->dmabuf, NULL, out, NULL, len, 0);
		if (n <= 0)
			error = refuse(c->method);
	}
	if (fsync(out))
		err(1, "%s", saved_path);
	close(out);
	return error;
}

static int refuse_by_dmafile(void)
{
	dmafile_strerror_r(why, sizeof(why));
	return -1;
}

static int store(const struct candidate *c, const struct memory *m, char **report)
{
	struct dmafile_part part = { .fd = m->memfd >= 0 ? m->memfd : m->dmabuf, .bytes = size };
	struct dmafile_save_options options = {
		.size = sizeof(options),
		.method = c->method,
		.io = c->io,
		.verify = c->verify,
		.block = c->block,
		.queue_depth = c->queue_depth,
		.flags = timed ? 0 : DMAFILE_SAVE_IN_PLACE,
	};

	return dmafile_save(&part, 1, saved_path, &options, report) < 0 ? refuse_by_dmafile() : 0;
}

static int run_save(const struct candidate *c, bool check)
{
	struct memory m = { -1, -1, NULL };
	unsigned long before;
	char *report = NULL;
	int error;

	if (add_pool(c, &before))
		return -1;
	error = make_source(c, &m);
	if (!error && !timed)
		make_place();
	else if (!error && unlink(saved_path) && errno != ENOENT)
		err(1, "%s", saved_path);
	settle();
	if (!error) {
		reached(START);
		reached(CREATED);
		error = is(c->verb, "store") ? store(c, &m, &report) : save(c, &m);
		reached(FILLED);
	}
	if (!error && check)
		check_saved(c);
	if (report && timed)
		printf("report %s\n", report);
	else if (report && check)
		printf("report %td %s\n", c - candidates, report);
	dmafile_report_free(report);
	close_memory(&m);
	if (is(c->pool, "made"))
		set_pool(before);
	if (!error) {
		settle();
		reached(CLOSED);
	}
	return error;
}

/* A recorder */

static int record(const struct candidate *c, const struct memory *m, struct dmafile_recorder_buffer *buffer)
{
	struct dmafile_recorder_options options = {
		.size = sizeof(options),
		.in_flight = c->queue_depth,
		.flags = is(c->verify, "none") ? DMAFILE_RECORD_NO_CHECKSUM : 0,
	};
	struct dmafile_recorder *recorder;
	size_t records = size / c->block, i;
	int error = 0;

	if (dmafile_recorder_new(saved_path, &options, &recorder))
		return refuse_by_dmafile();
	for (i = 0; i < records && !error; i++) {
		size_t at = i % c->queue_depth * c->block;

		/* A device may fill the buffer again once its previous record is written. */
		if (i >= c->queue_depth && dmafile_recorder_wait(recorder, i - c->queue_depth, -1) != 1)
			error = refuse_by_dmafile();
		if (!error && dmafile_recorder_append(recorder, buffer, at, c->block, i, m->memfd) < 0)
			error = refuse_by_dmafile();
	}
	if (!error && dmafile_recorder_finish(recorder, NULL))
		error = refuse_by_dmafile();
	dmafile_recorder_free(recorder);
	return error;
}

static void check_recorded(const struct candidate *c, const struct memory *m)
{
	struct dmafile_recording *recording;
	void *seen = malloc(c->block);
	size_t i;

	if (!seen || dmafile_recording_open(saved_path, &recording) || !dmafile_recording_is_complete(recording) ||
	    dmafile_recording_count(recording) != size / c->block)
		errx(1, "%s: not recorded", c->line);
	for (i = 0; i < size / c->block; i++)
		if (dmafile_recording_read(recording, i, seen, c->block) != (int64_t)c->block ||
		    memcmp(seen, m->map + i % c->queue_depth * c->block, c->block))
			errx(1, "%s: wrong bytes", c->line);
	dmafile_recording_free(recording);
	free(seen);
}

static int run_record(const struct candidate *c, bool check)
{
	struct dmafile_recorder_buffer *buffer = NULL;
	struct memory m = { -1, -1, NULL };
	unsigned long before;
	int error;

	if (!c->block || !c->queue_depth || c->queue_depth * c->block > size)
		errx(1, "%s: needs block and queue-depth, and a file as large as the buffers", c->line);
	if (add_pool(c, &before))
		return -1;
	error = make_source(c, &m) || (dmafile_recorder_attach(m.memfd, &buffer) && refuse_by_dmafile());
	if (unlink(saved_path) && errno != ENOENT)
		err(1, "%s", saved_path);
	if (!error) {
		reached(START);
		reached(CREATED);
		error = record(c, &m, buffer);
		reached(FILLED);
	}
	if (!error && check)
		check_recorded(c, &m);
	dmafile_recorder_detach(buffer);
	close_memory(&m);
	if (is(c->pool, "made"))
		set_pool(before);
	reached(CLOSED);
	return error;
}

/* All candidates */

static int attempt(const struct candidate *c, bool check)
{
	if (is(c->verb, "load"))
		return run_load(c, check);
	if (is(c->verb, "copy"))
		return run_copy(c, check);
	if (is(c->verb, "make"))
		return run_make(c);
	if (is(c->verb, "save") || is(c->verb, "store"))
		return run_save(c, check);
	if (is(c->verb, "record") && timed)
		return run_record(c, check);
	errx(1, "%s: unknown candidate", c->line);
}

static void run(struct candidate *c, int round)
{
	evict();
	printf("ran %td %d\n", c - candidates, round);
	begun = false;
	if (!attempt(c, round == 0)) {
		if (is(c->io, "direct"))
			expect_none_cached(c);
		return;
	}
	if (round > 0)
		errx(1, "%s: worked in an earlier round, but now fails: %s", c->line, why);
	/* A candidate that is refused before its first mark needs a group of marks, too. */
	if (!begun)
		reached(START);
	c->refused = true;
	printf("refused %td %s\n", c - candidates, why);
}

static unsigned long number(const char *text)
{
	char *end;
	unsigned long found = strtoul(text, &end, 0);

	if (end == text || *end)
		errx(1, "%s: not a number", text);
	return found;
}

static void parse(struct candidate *c)
{
	char *rest, *word;

	c->line[strcspn(c->line, "\n")] = '\0';
	word = strtok_r(strcpy(c->words, c->line), " ", &rest);
	c->verb = word;
	while ((word = strtok_r(NULL, " ", &rest))) {
		char *value = strchr(word, '=');

		if (!value)
			errx(1, "%s: a keyword needs a value", word);
		*value++ = '\0';
		if (is(word, "to") || is(word, "from"))
			c->to = value;
		else if (is(word, "pages"))
			c->pages = value;
		else if (is(word, "method"))
			c->method = value;
		else if (is(word, "io"))
			c->io = value;
		else if (is(word, "allocation"))
			c->allocation = value;
		else if (is(word, "pool"))
			c->pool = value;
		else if (is(word, "verify"))
			c->verify = value;
		else if (is(word, "chunk"))
			c->chunk = number(value);
		else if (is(word, "block"))
			c->block = number(value);
		else if (is(word, "queue-depth"))
			c->queue_depth = number(value);
		else
			errx(1, "%s: unknown keyword", word);
	}
}

static void read_candidates(const char *list)
{
	FILE *file = fopen(list, "r");

	if (!file)
		err(1, "%s", list);
	while (number_of_candidates < MAX_CANDIDATES &&
	       fgets(candidates[number_of_candidates].line, sizeof(candidates->line), file))
		parse(&candidates[number_of_candidates++]);
	fclose(file);
}

/* Whether a candidate needs huge pages from a pool. */
static bool wants_pool(void)
{
	int i;

	for (i = 0; i < number_of_candidates; i++)
		if (is(candidates[i].pages, "huge"))
			return true;
	return false;
}

static void name_files(const char *file)
{
	path = file;
	if (snprintf(saved_path, sizeof(saved_path), "%s.saved", path) >= (int)sizeof(saved_path))
		errx(1, "%s: too long", path);
}

static void in_rounds(char **words)
{
	int order[MAX_CANDIDATES], rounds, round, i;

	name_files(words[0]);
	size = number(words[1]) * KIB;
	rounds = number(words[2]);
	srand48(number(words[3]));
	read_candidates(words[4]);
	make_file();
	/*
	 * Thousands of freed pages stay on per-CPU lists until a later free or a timer returns them to the allocator,
	 * which costs up to a tenth of a load, and may count for another candidate. Short lists avoid that.
	 */
	if (set(PAGE_LISTS, "1000000"))
		errx(1, "%s", why);
	if (wants_pool()) {
		/* For the file's huge pages twice, one load more than ever runs at a time. */
		huge_pages = 2 * (size / HUGE_PAGE);
		set_pool(huge_pages);
	}

	for (i = 0; i < number_of_candidates; i++)
		order[i] = i;
	for (round = 0; round <= rounds; round++) {
		for (i = number_of_candidates - 1; i > 0; i--) {
			int other = lrand48() % (i + 1), here = order[i];

			order[i] = order[other];
			order[other] = here;
		}
		for (i = 0; i < number_of_candidates; i++)
			if (!candidates[order[i]].refused)
				run(&candidates[order[i]], round);
		fflush(stdout);
	}
}

/* Maps the file to compare with; it is not read before the comparison. */
static void map_wanted(const char *same)
{
	struct stat about;
	int fd = open(same, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &about))
		err(1, "%s", same);
	if ((size_t)about.st_size != size)
		errx(1, "%s: different size", same);
	wanted = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (wanted == MAP_FAILED)
		err(1, "%s", same);
	close(fd);
}

static void once(const char *file, const char *line, const char *same)
{
	static const char *const steps[] = { "create", "fill", "close" };
	struct candidate *c = &candidates[0];
	struct stat about;
	int i;

	name_files(file);
	if (stat(path, &about))
		err(1, "%s", path);
	size = about.st_size;
	if (strlen(line) >= sizeof(c->line))
		errx(1, "%s: too long", line);
	strcpy(c->line, line);
	parse(c);
	if (same)
		map_wanted(same);
	timed = true;
	if (attempt(c, same)) {
		printf("refused %s\n", why);
		return;
	}
	for (i = 0; i < CLOSED; i++)
		printf("%s %.9f %.6f\n", steps[i], moments[i + 1].time - moments[i].time,
		       moments[i + 1].busy - moments[i].busy);
}

int main(int argc, char **argv)
{
	if (argc == 7 && !strcmp(argv[1], "rounds"))
		in_rounds(argv + 2);
	else if ((argc == 4 || argc == 5) && !strcmp(argv[1], "once"))
		once(argv[2], argv[3], argv[4]);
	else
		errx(2, "ways rounds FILE KIB ROUNDS SEED CANDIDATES, or ways once FILE CANDIDATE [SAME]");
	return 0;
}
