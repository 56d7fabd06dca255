/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Common parts of the programs that test the pin tracker: /dev/pinner, which pins memory on
 * request, and all files in which the kernel reports pins.
 */
#ifndef _PINS_H
#define _PINS_H

#include <stdint.h>
#include <sys/wait.h>

#include "test.h"
#include "vm/pinner/pinner.h"

#define BOOKS		"/sys/kernel/debug/pin_owner/"
/* The output of `check` without errors, and the head of `pages` */
#define FINE		"pfn order pins references unexplained tgid pid since stack\n"
#define HUGE		(2UL << 20)

/* Bits of /proc/kpagepins */
#define COUNT_OF(word)	((__u32)(word))
#define IS_LONG(word)	((word) >> 32 & 1)
#define IS_EXACT(word)	((word) >> 33 & 1)

/* Bits of /proc/kpageflags */
#define KPF_HEAD	15
#define KPF_TAIL	16
#define KPF_HWPOISON	19
#define KPF_THP		22
#define KPF_ZERO	24
#define KPF_RESERVED	32
#define KPF_PINNED	43

static int pinner = -1;

static inline void open_pinner(void)
{
	pinner = open("/dev/pinner", O_RDWR | O_CLOEXEC);
	must(pinner >= 0, "/dev/pinner: %s", strerror(errno));
}

/* Returns the contents of a file in /proc, /sys or debugfs. The next call overwrites them. */
static inline char *text_of(const char *path)
{
	static char *text;
	static size_t room;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t len = 0;
	ssize_t got;

	must(fd >= 0, "%s: %s", path, strerror(errno));
	do {
		if (room - len < 65536) {
			room += 1 << 20;
			text = realloc(text, room);
			must(text, "memory for %s", path);
		}
		got = read(fd, text + len, room - len - 1);
		must(got >= 0, "read of %s: %s", path, strerror(errno));
		len += got;
	} while (got);
	close(fd);
	text[len] = 0;
	return text;
}

static inline bool write_to(const char *path, const char *word)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, word, strlen(word)) == (ssize_t)strlen(word);

	if (fd >= 0)
		close(fd);
	return done;
}

/* The kernel's reports on a page, by pfn */
static inline __u64 of_page(const char *path, __u64 pfn)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	__u64 word;

	must(fd >= 0, "%s: %s", path, strerror(errno));
	must(pread(fd, &word, sizeof(word), pfn * sizeof(word)) == sizeof(word),
	     "page %llx in %s: %s", pfn, path, strerror(errno));
	close(fd);
	return word;
}

static inline __u64 pins_of(__u64 pfn)
{
	return of_page("/proc/kpagepins", pfn);
}

static inline __u64 flags_of(__u64 pfn)
{
	return of_page("/proc/kpageflags", pfn);
}

/* Returns the pfn of a page of this process; 0 if it is not present. */
static inline __u64 pfn_at(const void *address)
{
	__u64 word = of_page("/proc/self/pagemap", (uintptr_t)address / PAGE);

	return word >> 63 ? word & ((1ULL << 55) - 1) : 0;
}

/* The pins of a page (-ENODATA if unknown), its references, and folio_maybe_dma_pinned() */
struct asked {
	int count, refs;
	bool maybe;
};

static inline struct asked ask(const void *address)
{
	struct pinner_ask ask = { .address = (uintptr_t)address };
	int result = call(pinner, PINNER_ASK, &ask);
	__u64 word;

	must(!result, "query of the page at %p: %s", address, why(result));
	word = pins_of(pfn_at(address));
	return (struct asked) {
		.count = IS_EXACT(word) ? (int)COUNT_OF(word) : -ENODATA,
		.refs = ask.refs,
		.maybe = ask.maybe,
	};
}

static inline int try_pin(struct pinner_pin *pin)
{
	pin->times = pin->times ?: 1;
	return call(pinner, PINNER_PIN, pin);
}

/* Returns a handle. */
static inline __u32 pin(enum pinner_how how, __u32 flags, const void *address, __u32 pages)
{
	struct pinner_pin pin = {
		.address = (uintptr_t)address,
		.pages = pages,
		.how = how,
		.flags = flags,
		.id = getpid(),
	};
	int result = try_pin(&pin);

	must(!result && pin.pinned == pages, "%u pages at %p by %u: %u are pinned, %s", pages,
	     address, how, pin.pinned, why(result));
	return pin.handle;
}

static inline void unpin_as(__u32 handle, __u32 first, __u32 count, enum pinner_where where,
			    enum pinner_by by)
{
	struct pinner_unpin unpin = { handle, first, count, where, by };
	int result = call(pinner, PINNER_UNPIN, &unpin);

	must(!result, "unpin of %u pages from %u of %u, %u, %u: %s", count, first, handle, where,
	     by, why(result));
}

static inline void unpin(__u32 handle, __u32 count)
{
	unpin_as(handle, 0, count, PINNER_TASK, PINNER_PAGES);
}

static inline void pfns_of(__u32 handle, __u32 count, __u64 *pfns)
{
	struct pinner_pages pages = {
		.handle = handle,
		.count = count,
		.pfns = (uintptr_t)pfns,
	};
	int result = call(pinner, PINNER_PFNS, &pages);

	must(!result, "pages of handle %u: %s", handle, why(result));
}

static inline long long pins_now(void)
{
	int fd = open("/proc/sys/vm/stat_refresh", O_RDONLY);
	char byte;

	/* vmstat counters are per CPU; this flushes them. */
	must(fd >= 0 && read(fd, &byte, 1) >= 0, "stat_refresh");
	close(fd);
	return number_in("/proc/vmstat", "nr_foll_pin_acquired") -
	       number_in("/proc/vmstat", "nr_foll_pin_released");
}

/* Counters that must have their old values once nothing is pinned */
struct counts {
	long long pins, bad;
};

static inline struct counts counts_now(void)
{
	return (struct counts) {
		.pins = pins_now(),
		.bad = number_in(BOOKS "stats", "unpinned-not-pinned"),
	};
}

static struct counts counts_before;
/* The time when they were recorded */
static __u64 noted_at;

/* The clock of owners, in ns */
static inline __u64 boot_time(void)
{
	struct timespec time;

	clock_gettime(CLOCK_BOOTTIME, &time);
	return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

/* Records them when there are no temporary pins. */
static inline void note_counts(void)
{
	struct counts again;

	noted_at = boot_time();

	do {
		counts_before = counts_now();
		usleep(200000);
		again = counts_now();
	} while (memcmp(&again, &counts_before, sizeof(again)));
}

static inline void consistent(void)
{
	char *text = text_of(BOOKS "check");

	must(!strcmp(text, FINE), "check says: %s", text);
}

/* Some pins end in a worker, and there are temporary pins in the machine. A leak is permanent. */
static inline void as_before(void)
{
	struct counts counts;
	unsigned int turn;

	for (turn = 0; turn < 600; turn++) {
		counts = counts_now();
		if (!memcmp(&counts, &counts_before, sizeof(counts)))
			break;
		usleep(100000);
	}
	must(turn < 600, "more than before: %lld pins, %lld errors",
	     counts.pins - counts_before.pins, counts.bad - counts_before.bad);
	consistent();
}

/* Returns the line of a file that contains all these words, or NULL. */
static inline char *line_with(char *text, const char *const *words, unsigned int count)
{
	static char line[1024];
	char *end;
	unsigned int i;

	for (; *text; text = end + 1) {
		end = strchr(text, '\n');
		if (!end)
			break;
		snprintf(line, sizeof(line), "%.*s", (int)(end - text), text);
		for (i = 0; i < count && strstr(line, words[i]); i++)
			;
		if (i == count)
			return line;
	}
	return NULL;
}

#define LINE(path, ...)								\
	({									\
		const char *const words[] = { __VA_ARGS__ };			\
		line_with(text_of(path), words, ARRAY_SIZE(words));		\
	})

/* The totals in /proc/PID/pins, and the sums of its lines */
struct sums {
	long long pins, bytes;
};

static inline struct sums sums_of(pid_t pid)
{
	char path[64];
	struct sums sums;

	snprintf(path, sizeof(path), "/proc/%d/pins", pid);
	must(sscanf(text_of(path), "pins %lld\nbytes %lld\n", &sums.pins, &sums.bytes) == 2,
	     "%s: %s", path, text_of(path));
	return sums;
}

/*
 * The sums of the lines of /proc/PID/pins whose call stack has a function with this part of a name.
 * *SINCE is their oldest time.
 */
static inline struct sums sums_from(pid_t pid, const char *part, __u64 *since)
{
	struct sums sums = {};
	char path[64], *line;

	*since = ~0ULL;
	snprintf(path, sizeof(path), "/proc/%d/pins", pid);
	for (line = strtok(text_of(path), "\n"); line; line = strtok(NULL, "\n")) {
		long long pins, bytes;
		__u64 time;

		if (!strstr(line, part))
			continue;
		must(sscanf(line, "%lld %lld %llu ", &pins, &bytes, &time) == 3, "%s: %s", path,
		     line);
		sums.pins += pins;
		sums.bytes += bytes;
		*since = time < *since ? time : *since;
	}
	return sums;
}

static inline void *map_at(size_t size, int flags, int fd)
{
	void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);

	must(map != MAP_FAILED, "mmap of %zu bytes: %s", size, strerror(errno));
	return map;
}

/* Allocates anonymous memory of small pages, all of them present. */
static inline __u8 *small_pages(unsigned int pages)
{
	__u8 *map = map_at(pages * PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	madvise(map, pages * PAGE, MADV_NOHUGEPAGE);
	memset(map, 1, pages * PAGE);
	return map;
}

/* The same with huge pages, where available. */
static inline __u8 *huge_pages(unsigned int count)
{
	__u8 *map = map_at((count + 1) * HUGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	__u8 *from = (__u8 *)round_up((uintptr_t)map, HUGE);

	munmap(map, from - map);
	munmap(from + count * HUGE, map + HUGE - from);
	madvise(from, count * HUGE, MADV_HUGEPAGE);
	memset(from, 1, count * HUGE);
	return from;
}

static inline bool is_huge(const void *address)
{
	return flags_of(pfn_at(address)) >> KPF_THP & 1;
}

/* Creates and maps a memfd. */
static inline __u8 *memfd_pages(const char *name, unsigned int flags, size_t size, int *fd)
{
	__u8 *map;

	*fd = memfd_create(name, flags | MFD_ALLOW_SEALING);
	must(*fd >= 0 && !ftruncate(*fd, size), "memfd: %s", strerror(errno));
	map = map_at(size, MAP_SHARED, *fd);
	memset(map, 1, size);
	return map;
}

static inline void wait_for(pid_t child)
{
	int status;

	must(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status),
	     "a child ended with %x", status);
}

#endif
