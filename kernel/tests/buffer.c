// SPDX-License-Identifier: GPL-2.0-only
/*
 * buffer FOLDER
 *
 * Tests how other programs and drivers use a dma-buf of the module: mappings, its name, fdinfo, CPU
 * access, importing drivers, fences that requests wait for, and the module's reference count. The
 * importing driver is vgem, if the kernel has it.
 */
#define _GNU_SOURCE
#include "test.h"
#include "../../tests/vm/inside/drm.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>

#define LENGTH	(1300000UL)
#define BUFFERS	"/sys/kernel/debug/dmafile/buffers"

static const char *folder;
static char path[4096];
static __u8 shadow[LENGTH + PAGE];

/* From drm/vgem_drm.h, which is in a separate package. */
struct drm_vgem_fence_attach {
	__u32 handle, flags, out_fence, pad;
};

struct drm_vgem_fence_signal {
	__u32 fence, flags;
};

#define DRM_IOCTL_VGEM_FENCE_ATTACH	_IOWR('d', 0x41, struct drm_vgem_fence_attach)
#define DRM_IOCTL_VGEM_FENCE_SIGNAL	_IOW('d', 0x42, struct drm_vgem_fence_signal)
#define VGEM_FENCE_WRITE		1

/* Returns a buffer with the contents of the file. */
static int loaded(void)
{
	struct dmafile_alloc_read load = {
		.size = sizeof(load),
		.fd_flags = O_RDWR | O_CLOEXEC,
		.file_fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC),
		.gather = 128 << 10,
	};
	int result = call(node, DMAFILE_IOC_ALLOC_READ, &load);

	must(!result && load.bytes == LENGTH, "%s: %s", path, why(result));
	close(load.file_fd);
	return load.fd;
}

static void check(const __u8 *map, const char *what)
{
	must(differ(map, shadow, sizeof(shadow) / PAGE * PAGE) == sizeof(shadow) / PAGE * PAGE,
	     "%s: differs at %zu", what, differ(map, shadow, LENGTH));
}

static void mappings(void)
{
	int fd = loaded(), i;
	__u64 size = size_of(fd), from;
	__u8 *map, *other;

	map = map_buffer(fd, PROT_READ | PROT_WRITE);
	check(map, "a mapping");
	/* Other mappings of any part see the same memory. */
	for (i = 0; i < 40; i++) {
		from = i * 7 % (size / PAGE) * PAGE;
		other = mmap(NULL, size - from, PROT_READ, MAP_SHARED, fd, from);
		must(other != MAP_FAILED, "mmap from %llu: %s", from, strerror(errno));
		must(differ(other, shadow + from, size - from) == size - from, "from %llu", from);
		map[from] ^= 0xff;
		must((other[0] ^ shadow[from]) == 0xff, "a write is not visible at %llu", from);
		map[from] ^= 0xff;
		munmap(other, size - from);
	}
	must(mmap(NULL, size + PAGE, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED,
	     "a range beyond the end can be mapped");
	must(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, size) == MAP_FAILED,
	     "a range after the end can be mapped");
	must(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED && errno == EINVAL,
	     "a private mapping: %s", strerror(errno));
	/* A mapping keeps the buffer after its descriptor has been closed. */
	unmap_buffer(fd, map);
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	must(number_in(STATS, "buffers") == 1, "a mapping does not keep its buffer");
	check(map, "a mapping without a descriptor");
	munmap(map, size);
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
}

/* debugfs shows root how the buffer was created, on one line. */
static void listed(int fd)
{
	char text[2048], want[512];
	struct stat stat;
	ssize_t len;
	int list;

	must(!fstat(fd, &stat), "fstat: %s", strerror(errno));
	list = open(BUFFERS, O_RDONLY | O_CLOEXEC);
	len = read(list, text, sizeof(text) - 1);
	must(len > 0, "%s: %s", BUFFERS, strerror(errno));
	text[len] = 0;
	snprintf(want, sizeof(want), "ino=%lu size=1302528 %s bytes=1300000 mode=%s file=%s\n",
		 (unsigned long)stat.st_ino, "alloc_read", "direct", "buffer odd?");
	must(!strcmp(text, want), "%s: %s, not %s", BUFFERS, text, want);
	must(!fstat(list, &stat) && (stat.st_mode & 0777) == 0400, "others can read the list: %o",
	     stat.st_mode);
	close(list);
}

static void words_about_it(void)
{
	char file[64], text[2048];
	int fd = loaded(), info, result;
	ssize_t len;

	result = ioctl(fd, DMA_BUF_SET_NAME_B, "weights");
	must(!result, "DMA_BUF_SET_NAME: %s", strerror(errno));
	snprintf(file, sizeof(file), "/proc/self/fdinfo/%d", fd);
	info = open(file, O_RDONLY);
	len = read(info, text, sizeof(text) - 1);
	must(len > 0, "%s: %s", file, strerror(errno));
	text[len] = 0;
	close(info);
	must(strstr(text, "\nname:\tweights\n"), "no name: %s", text);
	/* Programs that receive the buffer must not see the name of the file. */
	must(strstr(text, "\nexp_name:\tdmafile\n"), "another exporter: %s", text);
	must(!strstr(text, "odd"), "the file's name: %s", text);
	must(strstr(text, "\nsize:\t1302528\n"), "no size: %s", text);
	listed(fd);
	close(fd);
}

static void access_by_the_cpu(void)
{
	static const __u64 wrong[] = { 0, DMA_BUF_SYNC_START, DMA_BUF_SYNC_END, 8, 1 << 16 };
	int fd = loaded(), i;

	for (i = 0; i < (int)ARRAY_SIZE(wrong); i++) {
		struct dma_buf_sync sync = { .flags = wrong[i] };
		int result = call(fd, DMA_BUF_IOCTL_SYNC, &sync);

		must(result == -EINVAL, "sync with %llx: %s", wrong[i], why(result));
	}
	for (i = 1; i < 4; i++) {
		sync_cpu(fd, i | DMA_BUF_SYNC_START);
		sync_cpu(fd, i | DMA_BUF_SYNC_END);
	}
	/* A careless program may end an access that it has not begun. */
	sync_cpu(fd, DMA_BUF_SYNC_RW | DMA_BUF_SYNC_END);
	close(fd);
}

/* Opens the device node of vgem; -1 if there is none. */
static int vgem(void)
{
	int fd = drm_open("vgem");

	if (fd < 0)
		skipped = "this kernel has no such driver";
	return fd;
}

static __u32 imported(int device, int fd)
{
	struct drm_prime_handle prime = { .fd = fd };

	must(!ioctl(device, DRM_IOCTL_PRIME_FD_TO_HANDLE, &prime), "PRIME_FD_TO_HANDLE: %s",
	     strerror(errno));
	return prime.handle;
}

static void dropped(int device, __u32 handle)
{
	struct drm_gem_close gem = { .handle = handle };

	must(!ioctl(device, DRM_IOCTL_GEM_CLOSE, &gem), "GEM_CLOSE: %s", strerror(errno));
}

static int refill(int fd, __u32 flags)
{
	struct dmafile_rw rw = {
		.size = sizeof(rw),
		.flags = DMAFILE_READ | flags,
		.fd = fd,
		.file_fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC),
		.length = LENGTH,
	};
	int result;

	watch_dma(false);
	result = call(node, DMAFILE_IOC_RW, &rw);
	watch_dma(true);
	close(rw.file_fd);
	return result;
}

/* Fills a buffer again while one or more devices have it mapped. */
static void import(void)
{
	int device = vgem(), other, fd;
	struct drm_prime_handle prime = { .flags = O_CLOEXEC };
	__u32 handle;
	__u8 *map;

	if (device < 0)
		return;
	other = vgem();
	fd = loaded();
	handle = imported(device, fd);
	imported(other, fd);
	must(!refill(fd, 0), "RW into a buffer that is mapped for devices");
	/* Synchronise for devices, and then for the CPU again. */
	map = map_buffer(fd, PROT_READ);
	check(map, "an imported buffer");
	unmap_buffer(fd, map);
	close(fd);
	/* Now only the driver's object holds the buffer. Exporting it returns the same buffer. */
	prime.handle = handle;
	must(!ioctl(device, DRM_IOCTL_PRIME_HANDLE_TO_FD, &prime), "PRIME_HANDLE_TO_FD: %s",
	     strerror(errno));
	map = map_buffer(prime.fd, PROT_READ);
	check(map, "a buffer that an importer gave back");
	unmap_buffer(prime.fd, map);
	close(prime.fd);
	dropped(device, handle);
	must(number_in(STATS, "buffers") == 1, "the other importer does not keep the buffer");
	/* Closing the device also closes handles that a program has not closed. */
	close(other);
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
	close(device);
}

struct later {
	int device;
	__u32 fence;
};

static void *signal_later(void *argument)
{
	struct later *later = argument;
	struct drm_vgem_fence_signal fence = { .fence = later->fence };

	usleep(1500000);
	ioctl(later->device, DRM_IOCTL_VGEM_FENCE_SIGNAL, &fence);
	return NULL;
}

static void on_alarm(int number)
{
	(void)number;
}

static __u32 attach_fence(int device, __u32 handle, __u32 flags)
{
	struct drm_vgem_fence_attach attach = { .handle = handle, .flags = flags };

	must(!ioctl(device, DRM_IOCTL_VGEM_FENCE_ATTACH, &attach), "VGEM_FENCE_ATTACH: %s",
	     strerror(errno));
	return attach.out_fence;
}

static void write_out(int fd, int want)
{
	char out[4200];
	struct dmafile_rw rw = {
		.size = sizeof(rw), .flags = DMAFILE_WRITE, .fd = fd, .length = PAGE,
	};
	int result;

	snprintf(out, sizeof(out), "%s/out", folder);
	rw.file_fd = open(out, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(result == want, "WRITE of a buffer with a fence: %s", why(result));
	close(rw.file_fd);
}

/* A buffer is not filled while devices use it. */
static void fences(void)
{
	const struct itimerval every_second = { { 1, 0 }, { 1, 0 } }, never = { 0 };
	struct sigaction action = { .sa_handler = on_alarm };
	int device = vgem(), fd, result;
	struct later later;
	pthread_t thread;
	__u32 handle;
	double begun;

	if (device < 0)
		return;
	fd = loaded();
	handle = imported(device, fd);
	later = (struct later) { .device = device, .fence = attach_fence(device, handle, 0) };
	/* A device reads the buffer: a request may read it at the same time. */
	begun = now();
	write_out(fd, 0);
	must(now() - begun < 5, "WRITE waits for a device that only reads");
	begun = now();
	pthread_create(&thread, NULL, signal_later, &later);
	result = refill(fd, 0);
	must(!result && now() - begun > 1.4, "READ: %s after %.1f s", why(result), now() - begun);
	pthread_join(thread, NULL);
	/* A device writes to the buffer: a request that reads it waits. */
	later.fence = attach_fence(device, handle, VGEM_FENCE_WRITE);
	begun = now();
	pthread_create(&thread, NULL, signal_later, &later);
	write_out(fd, 0);
	must(now() - begun > 1.4, "WRITE waits for %.1f s only", now() - begun);
	pthread_join(thread, NULL);
	/* A signal ends an interruptible wait. Fences of vgem time out after 10 s. */
	sigaction(SIGALRM, &action, NULL);
	later.fence = attach_fence(device, handle, VGEM_FENCE_WRITE);
	/* More than one, because the first may arrive before the call. */
	setitimer(ITIMER_REAL, &every_second, NULL);
	begun = now();
	result = refill(fd, DMAFILE_INTERRUPTIBLE);
	must(result == -EINTR, "READ: %s after %.1f s", why(result), now() - begun);
	begun = now();
	result = refill(fd, 0);
	setitimer(ITIMER_REAL, &never, NULL);
	must(now() - begun > 5, "READ: %s after %.1f s, on a signal that does not kill",
	     why(result), now() - begun);
	must(!result, "READ: %s after a fence that failed", why(result));
	dropped(device, handle);
	close(fd);
	close(device);
}

/* The module cannot be unloaded while a buffer or a mapping of one exists. */
static void unloading(void)
{
	int fd = loaded(), result;
	__u8 *map = map_buffer(fd, PROT_READ);
	FILE *words;
	char line[256] = "";

	sync_cpu(fd, DMA_BUF_SYNC_RW | DMA_BUF_SYNC_END);
	close(node);
	result = syscall(SYS_delete_module, "dmafile", O_NONBLOCK);
	must(result && errno == EWOULDBLOCK, "unloaded under a buffer: %s", strerror(errno));
	close(fd);
	result = syscall(SYS_delete_module, "dmafile", O_NONBLOCK);
	must(result && errno == EWOULDBLOCK, "unloaded under a mapping: %s", strerror(errno));
	check(map, "a mapping after an attempt to unload the module");
	munmap(map, round_up(LENGTH, PAGE));
	result = syscall(SYS_delete_module, "dmafile", O_NONBLOCK);
	must(!result, "delete_module: %s", strerror(errno));
	must(access("/dev/dmafile", F_OK) && access(STATS, F_OK), "device node or debugfs is left");
	words = fopen("/proc/modules", "re");
	while (fgets(line, sizeof(line), words))
		must(strncmp(line, "dmafile ", 8), "the module is still loaded: %s", line);
	fclose(words);
}

static void set_up(void)
{
	int fd;

	/* A file name with a line feed must not create two lines. */
	snprintf(path, sizeof(path), "%s/buffer odd\n", folder);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	fill(shadow, 5, 0, LENGTH);
	must(fd >= 0 && write(fd, shadow, LENGTH) == (ssize_t)LENGTH && !fsync(fd), "%s: %s",
	     path, strerror(errno));
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "mappings", mappings },
	{ "words_about_it", words_about_it },
	{ "access_by_the_cpu", access_by_the_cpu },
	{ "import", import },
	{ "fences", fences },
	/* This must be the last test. */
	{ "unloading", unloading },
};

int main(int argc, char **argv)
{
	folder = argc > 1 ? argv[1] : ".";
	return run_tests(tests, ARRAY_SIZE(tests));
}
