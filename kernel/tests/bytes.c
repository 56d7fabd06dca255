// SPDX-License-Identifier: GPL-2.0-only
/*
 * bytes [-s] [-o] [-m] [-k] [-b SIZE] PLACE
 *
 * PLACE is a folder, or a block device whose contents are overwritten. -s: fewer cases; -o:
 * allocate all memory first; -m: files are in memory, as on tmpfs; -k: direct reads may leave pages
 * in the page cache, as on btrfs and f2fs; -b: the alignment of direct I/O.
 *
 * Tests that every byte of a file is read to its place in a buffer, that every byte of a buffer is
 * written to its place in a file, and that nothing else changes: for all kinds of offsets and
 * lengths, with direct and buffered I/O. Compares a mapping of the buffer with the file as read
 * through another descriptor.
 */
#define _GNU_SOURCE
#include "test.h"

#include <sys/inotify.h>

/* Small, so that tests with many sizes around it are fast. */
#define GATHER	(64UL << 10)
#define MAX	(6 * GATHER)
#define DIRT	0xa5

static const char *place;
static bool few, device;
/* The alignment of direct I/O */
static __u64 block = PAGE;
/* Flags of all requests */
static __u32 always;
static char path[4096];
/* The expected contents of the file */
static __u8 shadow[MAX], seen[MAX];
static __u64 size;
/* Another descriptor of the file, without O_DIRECT */
static int reader = -1;
static __u64 seed;

static const char * const modes[] = { "buffered", "direct" };

/* Files are always in memory; a direct read may leave pages in the page cache. */
static bool in_memory, keeps;
/* Do not drop the page cache. */
static bool dirty;

static unsigned long cached(void)
{
	/* A mapping of a file on overlayfs maps the pages of the underlying file. */
	unsigned char present[MAX / PAGE];
	unsigned long count = 0, pages = round_up(size, PAGE) / PAGE, i;
	void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, reader, 0);

	must(map != MAP_FAILED && !mincore(map, size, present), "mincore: %s", strerror(errno));
	for (i = 0; i < pages; i++)
		count += present[i] & 1;
	munmap(map, size);
	return count;
}

static void evict(void)
{
	int i;

	must(!fsync(reader), "fsync: %s", strerror(errno));
	/* Pages under readahead cannot be dropped and are not visible: wait for them. */
	must(pread(reader, seen, size, 0) == (ssize_t)size, "pread: %s", strerror(errno));
	for (i = 0; i < 20; i++) {
		posix_fadvise(reader, 0, 0, POSIX_FADV_DONTNEED);
		if (device || in_memory || keeps || !cached())
			return;
		usleep(20000);
	}
	must(false, "%s: %lu pages stay in the page cache", path, cached());
}

/* Creates a file of @len bytes. @holes has the start and end of each hole. */
static void make(__u64 len, const __u64 *holes, unsigned int nr)
{
	__u64 at = 0;
	unsigned int i;

	seed++;
	size = device ? size_of(reader) : len;
	must(size <= sizeof(shadow), "%s is too large", path);
	fill(shadow, seed, 0, size);
	if (!device) {
		if (reader >= 0)
			close(reader);
		unlink(path);
		reader = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		must(reader >= 0 && !ftruncate(reader, size), "%s: %s", path, strerror(errno));
	}
	for (i = 0; i <= nr; i++) {
		__u64 end = i < nr ? holes[2 * i] : size;

		must(pwrite(reader, shadow + at, end - at, at) == (ssize_t)(end - at),
		     "pwrite to %s: %s", path, strerror(errno));
		if (i < nr) {
			at = holes[2 * i + 1];
			memset(shadow + end, 0, at - end);
		}
	}
	evict();
}

/* Opens the file for a request; -1 if it does not support O_DIRECT. */
static int open_file(bool direct)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0));

	must(fd >= 0 || (direct && in_memory), "%s: %s", path, strerror(errno));
	return fd;
}

/* Checks that the other descriptor reads the expected contents. */
static void check_file(const char *what)
{
	struct stat stat;
	ssize_t got = pread(reader, seen, sizeof(seen), 0);

	must(!fstat(reader, &stat), "fstat: %s", strerror(errno));
	must(device || (__u64)stat.st_size == size, "%s: the file has %llu bytes, not %llu",
	     what, (__u64)stat.st_size, size);
	must(got == (ssize_t)size, "%s: pread: %zd of %llu bytes", what, got,
	     size);
	must(differ(seen, shadow, size) == size, "%s: the file differs at %zu", what,
	     differ(seen, shadow, size));
}

static const char *text(const char *what, bool direct, __u64 pos, __u64 at, __u64 len)
{
	static char buffer[256];

	snprintf(buffer, sizeof(buffer), "%s, %s, file of %llu, from %llu to %llu, %llu bytes",
		 what, modes[direct], size, pos,
		 at, len);
	return buffer;
}

static bool congruent(__u64 one, __u64 other)
{
	return !((one ^ other) & (block - 1));
}

/* Reads a part of the file into a new buffer. @len 0: up to the end of the file. */
static void load(bool direct, __u64 pos, __u64 at, __u64 len)
{
	__u64 wanted = len ? len : size - pos;
	const char *what = text("ALLOC_READ", direct, pos, at, wanted);
	struct dmafile_alloc_read read = {
		.size = sizeof(read),
		.fd_flags = O_RDONLY | O_CLOEXEC,
		.flags = always,
		.file_offset = pos,
		.length = len,
		.buffer_offset = at,
		.gather = GATHER,
	};
	const __u8 *map;
	__u64 all;
	int fd, result;

	fd = open_file(direct);
	if (fd < 0)
		return;
	if (!dirty)
		evict();
	lseek(fd, 123, SEEK_SET);
	read.file_fd = fd;
	result = call(node, DMAFILE_IOC_ALLOC_READ, &read);
	must(!result, "%s: %s", what, why(result));
	must(read.bytes == wanted, "%s: %llu bytes", what, read.bytes);
	must(lseek(fd, 0, SEEK_CUR) == 123, "%s: the file's position has moved", what);
	if (direct && !dirty && !in_memory && !keeps && !device)
		must(!cached(), "%s: %lu pages in the page cache", what, cached());
	if (!direct)
		must(read.mode == DMAFILE_MODE_BUFFERED, "%s: mode %x", what, read.mode);
	else if (congruent(pos, at))
		must(read.mode == DMAFILE_MODE_DIRECT, "%s: mode %x", what, read.mode);
	else
		must(read.mode == DMAFILE_MODE_BOUNCED, "%s: mode %x", what, read.mode);
	must(pread(reader, seen, wanted, pos) == (ssize_t)wanted, "%s: pread", what);
	must(differ(seen, shadow + pos, wanted) == wanted, "%s: the file itself differs", what);

	all = size_of(read.fd);
	must(all == round_up(at + wanted, direct && congruent(pos, at) ? block : PAGE),
	     "%s: the buffer has %llu bytes", what, all);
	must(read.align == (direct ? block : PAGE), "%s: aligned to %u", what, read.align);
	map = map_buffer(read.fd, PROT_READ);
	must(not_zero(map, 0, at) == at, "%s: not zero at %zu", what, not_zero(map, 0, at));
	must(differ(map + at, seen, wanted) == wanted, "%s: differs at %zu of it", what,
	     differ(map + at, seen, wanted));
	must(not_zero(map, at + wanted, all) == all, "%s: not zero at %zu", what,
	     not_zero(map, at + wanted, all));
	unmap_buffer(read.fd, (__u8 *)map);
	close(read.fd);
	close(fd);
}

static const __u64 places[] = {
	0, 1, 511, 512, 513, 4095, 4096, 4097, GATHER - 1, GATHER + 4096,
};

static const __u64 lengths[] = { 1, 513, 4096, 8191, GATHER + 1 };

/* The number of additional ranges with random offsets */
#define RANDOM	200

/* All combinations of offsets in the file and buffer, and more; with @few, one of each kind. */
static void each_range(bool direct, void (*visit)(bool direct, __u64 pos, __u64 at,
						  __u64 len))
{
	unsigned int pos, at, len;

	for (pos = 0; pos < ARRAY_SIZE(places); pos++)
		for (at = 0; at < ARRAY_SIZE(places); at++)
			for (len = 0; len < ARRAY_SIZE(lengths); len++)
				if (!few || (pos + 3 * at + 7 * len) % 16 == 0 ||
				    (pos == at && len > 3))
					visit(direct, places[pos], places[at], lengths[len]);
	srandom(1);
	for (pos = 0; !few && pos < RANDOM; pos++) {
		__u64 from = random() % GATHER, to = random() % GATHER;

		/* Every second pair is congruent, so that direct I/O needs no copy. */
		if (pos % 2)
			to += (from - to) % PAGE;
		visit(direct, from, to, 1 + random() % (2 * GATHER));
	}
}

static void whole_files(void)
{
	static const __u64 sizes[] = {
		1, 4096, GATHER - 1, GATHER, GATHER + 1, 3 * GATHER + 777,
		511, 512, 513, 4095, 4097, 2 * GATHER + 511, 2 * GATHER + 4095,
	};
	unsigned int i, direct;

	for (direct = 0; direct < 2; direct++)
		for (i = 0; i < (device ? 1 : ARRAY_SIZE(sizes)); i++) {
			make(sizes[i], NULL, 0);
			load(direct, 0, 0, 0);
			/* The end of a file, with data before it in the same block */
			load(direct, size / 2, 0, 0);
			load(direct, size - 1, 4095, 1);
		}
}

static void ranges_into_new_buffers(void)
{
	unsigned int direct;

	for (direct = 0; direct < 2; direct++) {
		make(3 * GATHER + 777, NULL, 0);
		each_range(direct, load);
	}
}

static void holes(void)
{
	static const __u64 where[][4] = {
		{ 0, GATHER + 4096 },
		{ GATHER, 2 * GATHER },
		{ 2 * GATHER, 3 * GATHER + 777 },
		{ 0, 4096, 3 * GATHER, 3 * GATHER + 777 },
		{ 8192, 12288, GATHER + 512, GATHER + 20000 },
		{ 0, 3 * GATHER + 777 },
	};
	unsigned int i, direct;

	if (device) {
		skipped = "a device has none";
		return;
	}
	for (direct = 0; direct < 2; direct++)
		for (i = 0; i < ARRAY_SIZE(where); i++) {
			make(3 * GATHER + 777, where[i], where[i][3] ? 2 : 1);
			load(direct, 0, 0, 0);
			load(direct, 511, 4096, GATHER + 8193);
		}
}

/* An existing buffer, and its expected contents */
static int target;
static __u8 *target_map;
static __u8 target_shadow[MAX];

static void new_target(__u8 dirt)
{
	target = new_buffer(MAX);
	target_map = map_buffer(target, PROT_READ | PROT_WRITE);
	memset(target_map, dirt, MAX);
	memset(target_shadow, dirt, MAX);
}

static void drop_target(void)
{
	unmap_buffer(target, target_map);
	close(target);
}

static struct dmafile_rw request(__u32 flags, int fd, __u64 pos, __u64 at, __u64 len)
{
	return (struct dmafile_rw) {
		.size = sizeof(struct dmafile_rw),
		.flags = flags | always,
		.fd = target,
		.file_fd = fd,
		.file_offset = pos,
		.buffer_offset = at,
		.length = len,
		.gather = GATHER,
	};
}

static void check_target(const char *what)
{
	must(differ(target_map, target_shadow, MAX) == MAX, "%s: the buffer differs at %zu", what,
	     differ(target_map, target_shadow, MAX));
}

/* Direct I/O is used for all parts that support it, and only for these. */
static void check_mode(const char *what, const struct dmafile_rw *rw, bool direct)
{
	__u64 end = rw->buffer_offset + rw->length;
	__u64 from = round_up(rw->buffer_offset, block), to = end / block * block;

	must(rw->align == (direct ? block : PAGE), "%s: aligned to %u", what, rw->align);

	if (!direct)
		must(rw->mode == DMAFILE_MODE_BUFFERED, "%s: mode %x", what, rw->mode);
	else if (!congruent(rw->file_offset, rw->buffer_offset) || from >= to)
		must(!(rw->mode & DMAFILE_MODE_DIRECT), "%s: mode %x", what, rw->mode);
	else if (from == rw->buffer_offset && to == end)
		must(rw->mode == DMAFILE_MODE_DIRECT, "%s: mode %x", what, rw->mode);
	else
		must(rw->mode & DMAFILE_MODE_DIRECT, "%s: mode %x", what, rw->mode);
}

static void rw_read(bool direct, __u64 pos, __u64 at, __u64 len)
{
	const char *what = text("RW READ", direct, pos, at, len);
	int fd = open_file(direct), result;
	struct dmafile_rw rw = request(DMAFILE_READ, fd, pos, at, len);

	if (fd < 0)
		return;
	lseek(fd, 123, SEEK_SET);
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result && rw.bytes == len, "%s: %s, %llu bytes", what, why(result),
	     rw.bytes);
	must(lseek(fd, 0, SEEK_CUR) == 123, "%s: the file's position has moved", what);
	check_mode(what, &rw, direct);
	must(pread(reader, target_shadow + at, len, pos) == (ssize_t)len, "%s: pread", what);
	check_target(what);
	/* Restore the buffer for the next case. */
	memset(target_map + at, DIRT, len);
	memset(target_shadow + at, DIRT, len);
	close(fd);
}

static void ranges_into_a_buffer(void)
{
	unsigned int direct;

	new_target(DIRT);
	for (direct = 0; direct < 2; direct++) {
		make(3 * GATHER + 777, NULL, 0);
		each_range(direct, rw_read);
		/* Up to the last byte of both */
		rw_read(direct, size - 777, MAX - 777, 777);
		rw_read(direct, 0, MAX - size, size);
	}
	drop_target();
}

static void rw_write(bool direct, __u64 pos, __u64 at, __u64 len)
{
	const char *what = text("RW WRITE", direct, pos, at, len);
	int fd = open_file(direct), result;
	struct dmafile_rw rw = request(DMAFILE_WRITE, fd, pos, at, len);

	if (fd < 0)
		return;
	if (direct && len == 4096)
		rw.flags |= DMAFILE_DSYNC;
	/* Each write has different data. */
	fill(target_map + at, ++seed, at, len);
	memcpy(target_shadow + at, target_map + at, len);
	lseek(fd, 123, SEEK_SET);
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result && rw.bytes == len, "%s: %s, %llu bytes", what, why(result),
	     rw.bytes);
	must(lseek(fd, 0, SEEK_CUR) == 123, "%s: the file's position has moved", what);
	check_mode(what, &rw, direct);
	memcpy(shadow + pos, target_shadow + at, len);
	if (!device && pos + len > size)
		size = pos + len;
	check_file(what);
	check_target(what);
	close(fd);
}

static void ranges_out_of_a_buffer(void)
{
	unsigned int direct;

	new_target(DIRT);
	for (direct = 0; direct < 2; direct++) {
		make(3 * GATHER + 777, NULL, 0);
		each_range(direct, rw_write);
		if (device)
			continue;
		/* Across the end, and far beyond it: the gap must be zero. */
		rw_write(direct, size - 100, 8191, 5000);
		rw_write(direct, size, 0, GATHER);
		memset(shadow + size, 0, 12345);
		size += 12345;
		rw_write(direct, size, size & (PAGE - 1), 4097);
	}
	drop_target();
}

/* Programs that watch the file are notified, whether the I/O was queued or not. */
static void heard(int watcher, __u32 mask, const char *what)
{
	__u64 text[512];
	__u32 seen = 0;
	ssize_t len;

	while ((len = read(watcher, text, sizeof(text))) > 0) {
		const struct inotify_event *event;
		ssize_t at = 0;

		while (at < len) {
			event = (void *)((char *)text + at);
			seen |= event->mask;
			at += sizeof(*event) + event->len;
		}
	}
	must(seen & mask, "%s: no notification but %x", what, seen);
}

static void watchers(void)
{
	static const struct { __u32 flags, mask; const char *what; } ways[] = {
		{ DMAFILE_READ, IN_ACCESS, "RW READ" }, { DMAFILE_WRITE, IN_MODIFY, "RW WRITE" },
	};
	int watcher = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	unsigned int way;

	make(3 * GATHER + 777, NULL, 0);
	new_target(DIRT);
	must(inotify_add_watch(watcher, path, IN_ACCESS | IN_MODIFY) >= 0, "%s: inotify: %s", path,
	     strerror(errno));
	for (way = 0; way < 2 * ARRAY_SIZE(ways); way++) {
		int fd = open_file(way & 1), result;
		struct dmafile_rw rw = request(ways[way / 2].flags, fd, 0, 0, 3 * GATHER);

		if (fd < 0)
			continue;
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result, "%s: %s", ways[way / 2].what, why(result));
		heard(watcher, ways[way / 2].mask, ways[way / 2].what);
		close(fd);
	}
	drop_target();
	close(watcher);
}

/* A file that is shorter than the requested length */
static void short_load(int fd, bool ok)
{
	struct dmafile_alloc_read read = {
		.size = sizeof(read),
		.fd_flags = O_RDWR,
		.flags = ok ? DMAFILE_SHORT_OK : 0,
		.file_fd = fd,
		.length = 3 * GATHER,
		.gather = GATHER,
	};
	int result = call(node, DMAFILE_IOC_ALLOC_READ, &read);
	const __u8 *map;

	must(result == (ok ? 0 : -ENODATA), "ALLOC_READ of %llu: %s", size, why(result));
	if (!ok)
		return;
	must(read.bytes == size, "ALLOC_READ of %llu: %llu bytes", size, read.bytes);
	map = map_buffer(read.fd, PROT_READ);
	must(differ(map, shadow, size) == size, "a short file of %llu differs", size);
	must(not_zero(map, size, 3 * GATHER) == 3 * GATHER, "not zero after a short file");
	unmap_buffer(read.fd, (__u8 *)map);
	close(read.fd);
}

static void short_read(int fd, bool ok)
{
	struct dmafile_rw rw = request(DMAFILE_READ | (ok ? DMAFILE_SHORT_OK : 0), fd, 0, 4096,
				       3 * GATHER);
	int result = call(node, DMAFILE_IOC_RW, &rw);

	must(result == (ok ? 0 : -ENODATA) && rw.bytes == size, "RW READ of %llu: %s, %llu bytes",
	     size, why(result), rw.bytes);
	must(differ(target_map + 4096, shadow, size) == size, "RW READ of a short file differs");
	/* The rest of the range is undefined. Memory around it is unchanged. */
	memset(target_map + 4096, DIRT, 3 * GATHER);
	check_target("RW READ of a short file");
}

static void short_files(void)
{
	static const __u64 ends[] = { 1, 5000, 8192, GATHER + 4096, 2 * GATHER + 777 };
	unsigned int direct, i, ok;

	if (device) {
		skipped = "a device has a fixed size";
		return;
	}
	new_target(DIRT);
	for (direct = 0; direct < 2; direct++)
		for (i = 0; i < ARRAY_SIZE(ends); i++)
			for (ok = 0; ok < 2; ok++) {
				int fd;

				make(ends[i], NULL, 0);
				fd = open_file(direct);
				if (fd < 0)
					continue;
				short_load(fd, ok);
				short_read(fd, ok);
				close(fd);
			}
	drop_target();
}

/* STRICT uses direct I/O for everything, or fails. */
struct strict_case {
	__u64 pos, at, len;
	/* Whether ALLOC_READ and RW succeed with blocks of 4096 bytes */
	bool load, rw;
};

/* The same with larger blocks, where more of them fail */
static struct strict_case with_blocks(struct strict_case one)
{
	one.load &= congruent(one.pos, one.at);
	one.rw &= one.load && !(one.at % block) && !((one.at + one.len) % block);
	return one;
}

static void strict_load(int fd, const struct strict_case *one, bool goes, const char *what)
{
	struct dmafile_alloc_read read = {
		.size = sizeof(read),
		.fd_flags = O_RDWR,
		.flags = DMAFILE_STRICT,
		.file_fd = fd,
		.file_offset = one->pos,
		.buffer_offset = one->at,
		.length = one->len,
	};
	int result = call(node, DMAFILE_IOC_ALLOC_READ, &read);

	must(result == (goes ? 0 : -EINVAL), "%s: ALLOC_READ: %s", what, why(result));
	if (!goes)
		return;
	must(read.mode == DMAFILE_MODE_DIRECT, "%s: mode %x", what, read.mode);
	must(read.bytes == one->len, "%s: %llu bytes", what, read.bytes);
	close(read.fd);
}

static void strict_rw(__u32 direction, int fd, const struct strict_case *one, bool goes,
		      const char *what)
{
	struct dmafile_rw rw = request(direction | DMAFILE_STRICT, fd, one->pos, one->at, one->len);
	int result = call(node, DMAFILE_IOC_RW, &rw);

	must(result == (goes ? 0 : -EINVAL), "%s: RW %x: %s", what, direction, why(result));
	must(rw.bytes == (goes ? one->len : 0ULL), "%s: RW %x of %llu", what, direction, rw.bytes);
	must(!goes || rw.mode == DMAFILE_MODE_DIRECT, "%s: mode %x", what, rw.mode);
	if (goes && direction == DMAFILE_READ)
		memcpy(target_shadow + one->at, shadow + one->pos, one->len);
	else if (goes)
		memcpy(shadow + one->pos, target_shadow + one->at, one->len);
	check_target(what);
	check_file(what);
}

static void strict(void)
{
	static const struct strict_case cases[] = {
		{ 0, 0, 8192, true, true },
		{ 4096, 8192, GATHER, true, true },
		{ 0, 0, 4097, true, false },
		{ 4097, 1, 4096, true, false },
		{ 0, 512, 8192, false, false },
		{ 512, 0, 8192, false, false },
		{ 1, 0, 1, false, false },
		{ 4095, 4095, 1, true, false },
		/* The file ends inside a block: this needs no copy. */
		{ 3 * GATHER, 0, 512, true, false },
	};
	unsigned int direct, i;

	new_target(DIRT);
	for (direct = 0; direct < 2; direct++)
		for (i = 0; i < ARRAY_SIZE(cases); i++) {
			const struct strict_case seen_as = with_blocks(cases[i]), *one = &seen_as;
			const char *what;
			int fd;

			make(3 * GATHER + 512, NULL, 0);
			what = text("STRICT", direct, one->pos, one->at, one->len);
			fd = open_file(direct);
			if (fd < 0)
				continue;
			strict_load(fd, one, direct && one->load, what);
			strict_rw(DMAFILE_READ, fd, one, direct && one->rw, what);
			fill(target_map, ++seed, 0, MAX);
			memcpy(target_shadow, target_map, MAX);
			strict_rw(DMAFILE_WRITE, fd, one, direct && one->rw, what);
			close(fd);
		}
	drop_target();
}

/* Data that is only in the page cache so far is read correctly, also by direct I/O. */
static void dirty_pages(void)
{
	unsigned int direct;

	for (direct = 0; direct < 2; direct++) {
		make(2 * GATHER + 777, NULL, 0);
		fill(shadow + 5000, ++seed, 0, GATHER);
		must(pwrite(reader, shadow + 5000, GATHER, 5000) == (ssize_t)GATHER, "pwrite");
		dirty = true;
		load(direct, 0, 0, 0);
		dirty = false;
	}
}

static const struct test tests[] = {
	{ "whole_files", whole_files },
	{ "holes", holes },
	{ "short_files", short_files },
	{ "strict", strict },
	{ "dirty_pages", dirty_pages },
	{ "ranges_into_new_buffers", ranges_into_new_buffers },
	{ "ranges_into_a_buffer", ranges_into_a_buffer },
	{ "ranges_out_of_a_buffer", ranges_out_of_a_buffer },
	{ "watchers", watchers },
};

int main(int argc, char **argv)
{
	struct stat stat_of;
	int option;

	while ((option = getopt(argc, argv, "somkb:")) != -1) {
		few |= option == 's';
		in_memory |= option == 'm';
		keeps |= option == 'k';
		if (option == 'o')
			always = DMAFILE_IN_ORDER;
		if (option == 'b')
			block = strtoull(optarg, NULL, 0);
	}
	place = argv[optind];
	if (!place || stat(place, &stat_of)) {
		fprintf(stderr, "bytes [-s] [-o] [-m] [-k] [-b SIZE] PLACE\n");
		return 2;
	}
	device = S_ISBLK(stat_of.st_mode);
	snprintf(path, sizeof(path), device ? "%s" : "%s/bytes", place);
	if (device) {
		reader = open(path, O_RDWR | O_CLOEXEC);
		must(reader >= 0, "%s: %s", path, strerror(errno));
	}
	return run_tests(tests, ARRAY_SIZE(tests));
}
