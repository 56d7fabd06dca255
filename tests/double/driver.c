/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A double of the drivers of GPUs: the functions of libcuda.so.1 that dmafile calls or, with -DHIP, those
 * of libamdhip64.so. It has two devices, whose memory is memory of this process. Each stream has a thread,
 * which makes the stream's copies after random delays. The double counts a complaint for each mistake that
 * would do harm with a real driver, which might not report it: a source that changes between the call and
 * the copy, or is not registered, or not in one piece; a destination outside of all device memory; a call
 * without a current context, or in that of another device than the call's stream, event or memory.
 *
 * Tests control it with the functions double_*(), or from outside the process with two variables:
 * DOUBLE_FAIL=NAME:N:CODE makes the N-th call of NAME (such as cuEventRecord) return CODE, or every
 * call from the N-th on if N is negative, and DOUBLE_REPORT=FILE appends a line of JSON to FILE when
 * the process exits.
 *
 * With -DUNCHECKED, copies have no delays, and no checksums that find a source which changes: for
 * measurements.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef HIP
#define NAME(cu, hip) hip
#else
#define NAME(cu, hip) cu
#endif
#ifdef UNCHECKED
#define DELAY_US 0
#else
#define DELAY_US 200
#endif
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
       INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
       /* The driver has no text for it. */
       UNKNOWN = 998 };
/* How many of the devices there are for the caller. */
#ifndef VISIBLE
#define VISIBLE 2
#endif
enum { DEVICES = 2, ANY = -1, MOST = 4096, DEEP = 64 };

/* Memory of a device, or registered for one; of all devices if `device` is ANY. */
struct range { uintptr_t start, end; int device; };

/*
 * One recording of an event: whether everything queued before it has completed. A wait uses the recording
 * that was current when the wait was queued.
 */
struct mark { bool come; int users; };
struct event { struct mark *mark; int device; };

struct work {
	struct work *next;
	enum { COPY, RECORD, WAIT } kind;
	unsigned char *to;
	const unsigned char *from;
	size_t len;
	uint64_t sum;
	struct mark *mark;
};

struct stream {
	pthread_t thread;
	struct work *first, **last;
	bool busy, over;
	int device;
	uint64_t random;
};

struct context { int device, retained; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static struct range registered[MOST], memory[MOST];
static struct context contexts[DEVICES] = { { 0, 0 }, { 1, 0 } };
static int events, streams, complaints, copies, delay_us = DELAY_US;
static uint64_t registered_now, registered_peak, copied;
static pid_t owner;
static bool read_only_works = true;
static char complaint[256], failing[64];
static int fail_at, fail_code, calls_of_failing;
static __thread struct context *stack[DEEP];
static __thread int depth;

static void complain(const char *what)
{
	if (!complaints++)
		snprintf(complaint, sizeof(complaint), "%s", what);
}

static void report(void)
{
	const char *path = getenv("DOUBLE_REPORT");
	FILE *file = path && getpid() == owner ? fopen(path, "a") : NULL;
	int left = 0, allocated = 0;

	if (!file)
		return;
	for (int i = 0; i < MOST; i++) {
		left += registered[i].end != 0;
		allocated += memory[i].end != 0 && memory[i].device >= 0;
	}
	fprintf(file, "{\"registered\": %d, \"memory\": %d, \"events\": %d, \"streams\": %d, "
		"\"contexts\": %d, \"complaints\": %d, \"copies\": %d, \"copied\": %llu, "
		"\"peak\": %llu, \"complaint\": \"%s\"}\n",
		left, allocated, events, streams, contexts[0].retained + contexts[1].retained,
		complaints, copies, (unsigned long long)copied,
		(unsigned long long)registered_peak, complaint);
	fclose(file);
}

static void hold(void)
{
	pthread_mutex_lock(&lock);
}

static void let_go(void)
{
	pthread_mutex_unlock(&lock);
}

static __attribute__((constructor)) void begin(void)
{
	const char *fail = getenv("DOUBLE_FAIL");

	if (fail && sscanf(fail, "%63[^:]:%d:%d", failing, &fail_at, &fail_code) != 3)
		abort();
	atexit(report);
	/* Otherwise a child might inherit the lock from a thread that it does not have. */
	pthread_atfork(hold, let_go, let_go);
}

static void put(struct mark *mark)
{
	if (mark && !--mark->users)
		free(mark);
}

static bool has_come(struct event *event)
{
	return !event->mark || event->mark->come;
}

/* The error code that this call must return, or OK. The lock is held. */
static int fails(const char *name)
{
	if (strcmp(name, failing))
		return OK;
	calls_of_failing++;
	if (fail_at < 0 ? calls_of_failing >= -fail_at : calls_of_failing == fail_at)
		return fail_code;
	return OK;
}

static uint64_t sum_of(const unsigned char *at, size_t len)
{
#ifdef UNCHECKED
	return 0;
#endif
	uint64_t sum = 0x9e3779b97f4a7c15u, word;

	for (; len >= 8; at += 8, len -= 8) {
		memcpy(&word, at, 8);
		sum = (sum ^ word) * 0x100000001b3u;
	}
	while (len--)
		sum = (sum ^ *at++) * 0x100000001b3u;
	return sum;
}

static struct range *find(struct range *all, uintptr_t start, size_t len)
{
	for (int i = 0; i < MOST; i++)
		if (all[i].end && all[i].start <= start && start + len <= all[i].end)
			return &all[i];
	return NULL;
}

static bool overlaps(struct range *all, uintptr_t start, size_t len)
{
	for (int i = 0; i < MOST; i++)
		if (all[i].end && all[i].start < start + len && start < all[i].end)
			return true;
	return false;
}

static int add(struct range *all, uintptr_t start, size_t len, int device)
{
	for (int i = 0; i < MOST; i++)
		if (!all[i].end) {
			all[i] = (struct range){ start, start + len, device };
			return OK;
		}
	return OUT_OF_MEMORY;
}

/* Checks a call that needs a current context. The lock is held. */
static int check(const char *name)
{
	int code = fails(name);

	if (code)
		return code;
	if (owner != getpid())
		return NOT_INITIALIZED;
	if (!depth || !stack[depth - 1]->retained) {
		complain("a call without a context");
		return INVALID_CONTEXT;
	}
	return OK;
}

/* Checks that something of a device is used in the context of that device. The lock is held. */
static void check_device(int device)
{
	if (device != ANY && device != stack[depth - 1]->device)
		complain("a call in the context of another device");
}

/* Whether all of a range is mapped; *writable tells whether all of it is mapped for writing. */
static bool mapped(uintptr_t start, uintptr_t end, bool *writable)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long from, to;
	char flags[8], line[512];

	*writable = true;
	while (maps && start < end && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx %7s", &from, &to, flags) != 3 || to <= start)
			continue;
		if (from > start)
			break;
		*writable &= flags[1] == 'w';
		start = to;
	}
	if (maps)
		fclose(maps);
	return start >= end;
}

/* Allocates all pages of a range, as pinning does; on kernels before 5.14, without madvise, none. */
static int allocate(void *at, size_t len, bool read_only)
{
	/* MADV_POPULATE_READ and MADV_POPULATE_WRITE. */
	return !madvise(at, len, read_only ? 22 : 23) || errno == EINVAL ? OK : OUT_OF_MEMORY;
}

static void *run(void *arg)
{
	struct stream *stream = arg;

	pthread_mutex_lock(&lock);
	for (;;) {
		struct work *work = stream->first;

		if (!work && stream->over)
			break;
		if (!work) {
			pthread_cond_wait(&moved, &lock);
			continue;
		}
		if (work->kind == WAIT && !work->mark->come) {
			pthread_cond_wait(&moved, &lock);
			continue;
		}
		stream->first = work->next;
		if (!stream->first)
			stream->last = &stream->first;
		stream->busy = true;
		if (work->kind == COPY) {
			stream->random = stream->random * 6364136223846793005u + 1442695040888963407u;
			int delay = delay_us ? (stream->random >> 33) % delay_us : 0;
			pthread_mutex_unlock(&lock);
			if (delay)
				nanosleep(&(struct timespec){ 0, delay * 1000L }, NULL);
			pthread_mutex_lock(&lock);
			bool there = find(memory, (uintptr_t)work->to, work->len);

			if (!there)
				complain("a destination is freed before its copy");
			pthread_mutex_unlock(&lock);
			bool same = sum_of(work->from, work->len) == work->sum;

			if (there)
				memcpy(work->to, work->from, work->len);
			same &= sum_of(work->from, work->len) == work->sum;
			pthread_mutex_lock(&lock);
			if (!same)
				complain("a source has changed before its copy");
			if (!find(registered, (uintptr_t)work->from, work->len))
				complain("a source is not registered any more at its copy");
		} else if (work->kind == RECORD) {
			work->mark->come = true;
		}
		put(work->mark);
		stream->busy = false;
		pthread_cond_broadcast(&moved);
		free(work);
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

static int enqueue(struct stream *stream, struct work work)
{
	struct work *copy = malloc(sizeof(*copy));

	if (!stream) {
		free(copy);
		return INVALID_HANDLE;
	}
	*copy = work;
	copy->next = NULL;
	*stream->last = copy;
	stream->last = &copy->next;
	pthread_cond_broadcast(&moved);
	return OK;
}

/* A driver function: CALL(both names, arguments) { BEGIN(check, both names) ... END; } */
#define CALL(cu, hip, ...) int NAME(cu, hip)(__VA_ARGS__); \
	int NAME(cu, hip)(__VA_ARGS__)
#define BEGIN(how, cu, hip) \
	pthread_mutex_lock(&lock); \
	int code = how(TEXT(NAME(cu, hip))); \
	if (code == OK)
#define END pthread_mutex_unlock(&lock); return code

CALL(cuInit, hipInit, unsigned int flags)
{
	BEGIN(fails, cuInit, hipInit) {
		if (!owner)
			owner = getpid();
		code = owner == getpid() && !flags ? OK : NOT_INITIALIZED;
	}
	END;
}

CALL(cuDriverGetVersion, hipDriverGetVersion, int *version)
{
	BEGIN(fails, cuDriverGetVersion, hipDriverGetVersion)
		*version = 13050;
	END;
}

CALL(cuDeviceGetCount, hipGetDeviceCount, int *count)
{
	BEGIN(fails, cuDeviceGetCount, hipGetDeviceCount)
		*count = VISIBLE;
	END;
}

CALL(cuDeviceGet, hipDeviceGet, int *device, int ordinal)
{
	BEGIN(fails, cuDeviceGet, hipDeviceGet) {
		code = ordinal >= 0 && ordinal < VISIBLE ? OK : INVALID_DEVICE;
		*device = ordinal;
	}
	END;
}

CALL(cuDeviceGetName, hipDeviceGetName, char *name, int len, int device)
{
	BEGIN(fails, cuDeviceGetName, hipDeviceGetName)
		snprintf(name, len, "double %d", device);
	END;
}

CALL(cuDeviceGetAttribute, hipDeviceGetAttribute, int *value, int attribute, int device)
{
	BEGIN(fails, cuDeviceGetAttribute, hipDeviceGetAttribute) {
		/* 113 is READ_ONLY_HOST_REGISTER_SUPPORTED; the double has no PCI address. */
		*value = attribute == 113 ? read_only_works : 0;
		code = device >= 0 && device < DEVICES ? OK : INVALID_DEVICE;
	}
	END;
}

CALL(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain, struct context **context, int device)
{
	BEGIN(fails, cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain) {
		if (owner != getpid()) {
			code = NOT_INITIALIZED;
		} else {
			*context = &contexts[device];
			contexts[device].retained++;
		}
	}
	END;
}

CALL(cuDevicePrimaryCtxRelease_v2, hipDevicePrimaryCtxRelease, int device)
{
	BEGIN(fails, cuDevicePrimaryCtxRelease_v2, hipDevicePrimaryCtxRelease) {
		if (contexts[device].retained-- <= 0)
			complain("a context is released too often");
	}
	END;
}

CALL(cuCtxPushCurrent_v2, hipCtxPushCurrent, struct context *context)
{
	BEGIN(fails, cuCtxPushCurrent_v2, hipCtxPushCurrent) {
		if (owner != getpid())
			code = NOT_INITIALIZED;
		else if (depth == DEEP)
			code = INVALID_CONTEXT;
		else
			stack[depth++] = context;
	}
	END;
}

CALL(cuCtxPopCurrent_v2, hipCtxPopCurrent, struct context **context)
{
	BEGIN(fails, cuCtxPopCurrent_v2, hipCtxPopCurrent) {
		if (!depth)
			code = INVALID_CONTEXT;
		else
			*context = stack[--depth];
	}
	END;
}

CALL(cuMemAlloc_v2, hipMalloc, uintptr_t *at, size_t len)
{
	BEGIN(check, cuMemAlloc_v2, hipMalloc) {
		void *block = len ? aligned_alloc(512, (len + 511) / 512 * 512) : NULL;

		code = block ? add(memory, (uintptr_t)block, len, stack[depth - 1]->device)
			     : len ? OUT_OF_MEMORY : INVALID_VALUE;
		*at = (uintptr_t)block;
	}
	END;
}

CALL(cuMemFree_v2, hipFree, uintptr_t at)
{
	BEGIN(check, cuMemFree_v2, hipFree) {
		struct range *range = find(memory, at, 1);

		if (!range || range->start != at) {
			code = INVALID_VALUE;
		} else {
			check_device(range->device);
			range->end = 0;
			free((void *)at);
		}
	}
	END;
}

CALL(cuMemHostRegister_v2, hipHostRegister, void *at, size_t len, unsigned int flags)
{
	BEGIN(check, cuMemHostRegister_v2, hipHostRegister) {
		bool writable, read_only = flags & 8;

#ifdef HIP
		/* In HIP, this bit means something else. */
		if (read_only)
			complain("a flag that HIP does not have");
#endif
		if (!len || (uintptr_t)at % 4096 || !mapped((uintptr_t)at, (uintptr_t)at + len, &writable))
			code = INVALID_VALUE;
		else if (overlaps(registered, (uintptr_t)at, len))
			code = ALREADY_REGISTERED;
		else if (read_only && !read_only_works)
			code = NOT_SUPPORTED;
		else if (!read_only && !writable)
			code = INVALID_VALUE;
		else
			code = allocate(at, len, read_only);
		if (code == OK)
			/* 1 is PORTABLE. */
			code = add(registered, (uintptr_t)at, len,
				   flags & 1 ? ANY : stack[depth - 1]->device);
		if (code == OK) {
			registered_now += len;
			if (registered_now > registered_peak)
				registered_peak = registered_now;
		}
	}
	END;
}

CALL(cuMemHostUnregister, hipHostUnregister, void *at)
{
	BEGIN(check, cuMemHostUnregister, hipHostUnregister) {
		struct range *range = find(registered, (uintptr_t)at, 1);
		bool writable;

		if (!range || range->start != (uintptr_t)at) {
			code = NOT_REGISTERED;
		} else {
			if (!mapped(range->start, range->end, &writable))
				complain("memory is gone before it is unregistered");
			registered_now -= range->end - range->start;
			range->end = 0;
		}
	}
	END;
}

CALL(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, uintptr_t to, const void *from, size_t len,
     struct stream *stream)
{
	BEGIN(check, cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync) {
		struct range *into = find(memory, to, len);
		struct range *source = find(registered, (uintptr_t)from, len);

		if (!into) {
			complain("a destination lies outside of all memory");
			code = INVALID_VALUE;
		} else if (!source) {
			complain("a source is not registered in one piece");
			code = INVALID_VALUE;
		} else {
			check_device(into->device);
			check_device(source->device);
			check_device(stream ? stream->device : ANY);
			copies++;
			copied += len;
			code = enqueue(stream, (struct work){ .kind = COPY, .to = (void *)to,
				.from = from, .len = len, .sum = sum_of(from, len) });
		}
	}
	END;
}

CALL(cuMemcpyDtoH_v2, hipMemcpyDtoH, void *to, uintptr_t from, size_t len)
{
	BEGIN(check, cuMemcpyDtoH_v2, hipMemcpyDtoH) {
		struct range *range = find(memory, from, len);

		if (!range) {
			code = INVALID_VALUE;
		} else {
			check_device(range->device);
			memcpy(to, (void *)from, len);
		}
	}
	END;
}

CALL(cuStreamCreate, hipStreamCreateWithFlags, struct stream **made, unsigned int flags)
{
	(void)flags;
	BEGIN(check, cuStreamCreate, hipStreamCreateWithFlags) {
		struct stream *stream = calloc(1, sizeof(*stream));

		stream->last = &stream->first;
		stream->device = stack[depth - 1]->device;
		stream->random = (uintptr_t)stream + copies;
		if (pthread_create(&stream->thread, NULL, run, stream)) {
			free(stream);
			code = OUT_OF_MEMORY;
		} else {
			streams++;
			*made = stream;
		}
	}
	END;
}

CALL(cuStreamDestroy_v2, hipStreamDestroy, struct stream *stream)
{
	BEGIN(check, cuStreamDestroy_v2, hipStreamDestroy) {
		check_device(stream->device);
		stream->over = true;
		pthread_cond_broadcast(&moved);
		pthread_mutex_unlock(&lock);
		pthread_join(stream->thread, NULL);
		pthread_mutex_lock(&lock);
		free(stream);
		streams--;
	}
	END;
}

CALL(cuStreamSynchronize, hipStreamSynchronize, struct stream *stream)
{
	BEGIN(check, cuStreamSynchronize, hipStreamSynchronize) {
		check_device(stream ? stream->device : ANY);
		while (stream && (stream->first || stream->busy))
			pthread_cond_wait(&moved, &lock);
	}
	END;
}

CALL(cuStreamWaitEvent, hipStreamWaitEvent, struct stream *stream, struct event *event,
     unsigned int flags)
{
	(void)flags;
	BEGIN(check, cuStreamWaitEvent, hipStreamWaitEvent) {
		check_device(stream->device);
		check_device(event->device);
		if (!has_come(event)) {
			event->mark->users++;
			code = enqueue(stream, (struct work){ .kind = WAIT, .mark = event->mark });
		}
	}
	END;
}

CALL(cuEventCreate, hipEventCreateWithFlags, struct event **made, unsigned int flags)
{
	(void)flags;
	BEGIN(check, cuEventCreate, hipEventCreateWithFlags) {
		*made = calloc(1, sizeof(**made));
		(*made)->device = stack[depth - 1]->device;
		events++;
	}
	END;
}

CALL(cuEventRecord, hipEventRecord, struct event *event, struct stream *stream)
{
	BEGIN(check, cuEventRecord, hipEventRecord) {
		check_device(event->device);
		check_device(stream ? stream->device : ANY);
		put(event->mark);
		event->mark = NULL;
		/* The default stream (NULL) is always idle here. */
		if (stream) {
			event->mark = calloc(1, sizeof(*event->mark));
			event->mark->users = 2;
			code = enqueue(stream, (struct work){ .kind = RECORD, .mark = event->mark });
		}
	}
	END;
}

CALL(cuEventQuery, hipEventQuery, struct event *event)
{
	BEGIN(check, cuEventQuery, hipEventQuery) {
		check_device(event->device);
		code = has_come(event) ? OK : NOT_READY;
	}
	END;
}

CALL(cuEventSynchronize, hipEventSynchronize, struct event *event)
{
	BEGIN(check, cuEventSynchronize, hipEventSynchronize) {
		check_device(event->device);
		while (!has_come(event))
			pthread_cond_wait(&moved, &lock);
	}
	END;
}

CALL(cuEventDestroy_v2, hipEventDestroy, struct event *event)
{
	BEGIN(check, cuEventDestroy_v2, hipEventDestroy) {
		check_device(event->device);
		/* It may still come: then its stream uses the mark. */
		put(event->mark);
		free(event);
		events--;
	}
	END;
}

CALL(cuGetErrorString, hipDrvGetErrorString, int code, const char **text)
{
	*text = code == OUT_OF_MEMORY ? "out of memory" : code == NOT_SUPPORTED ?
		"operation not supported" : code == NO_DEVICE ? "no device is detected" :
		code == INVALID_VALUE ? "invalid argument" : code == UNKNOWN ? NULL :
		"a failure of the double";
	return *text ? OK : INVALID_VALUE;
}

/* Makes the nth call of a function fail, or every call from the nth on if `nth` is negative. */
void double_fail(const char *name, int nth, int code);
void double_fail(const char *name, int nth, int code)
{
	pthread_mutex_lock(&lock);
	snprintf(failing, sizeof(failing), "%s", name);
	fail_at = nth;
	fail_code = code;
	calls_of_failing = 0;
	pthread_mutex_unlock(&lock);
}

/* Number of calls since double_fail() of the function that it named. */
int double_calls(void);
int double_calls(void)
{
	pthread_mutex_lock(&lock);
	int calls = calls_of_failing;

	pthread_mutex_unlock(&lock);
	return calls;
}

/* The device whose memory this is; ANY if it is no memory of a device. */
int double_device(uintptr_t at);
int double_device(uintptr_t at)
{
	pthread_mutex_lock(&lock);
	struct range *range = find(memory, at, 1);
	int device = range ? range->device : ANY;

	pthread_mutex_unlock(&lock);
	return device;
}

void double_set(int delay, int read_only);
void double_set(int delay, int read_only)
{
	pthread_mutex_lock(&lock);
	delay_us = delay;
	read_only_works = read_only;
	pthread_mutex_unlock(&lock);
}

/* Forgets what tests with failing calls have left behind, and all complaints. */
void double_reset(void);
void double_reset(void)
{
	pthread_mutex_lock(&lock);
	memset(registered, 0, sizeof(registered));
	memset(memory, 0, sizeof(memory));
	contexts[0].retained = contexts[1].retained = 0;
	events = streams = complaints = copies = depth = 0;
	registered_now = registered_peak = 0;
	failing[0] = complaint[0] = 0;
	pthread_mutex_unlock(&lock);
}

/* Treats memory of this process as memory of a device. */
int double_adopt(void *at, size_t len);
int double_adopt(void *at, size_t len)
{
	pthread_mutex_lock(&lock);
	int code = add(memory, (uintptr_t)at, len, ANY);

	pthread_mutex_unlock(&lock);
	return code;
}

void double_disown(void *at);
void double_disown(void *at)
{
	pthread_mutex_lock(&lock);
	struct range *range = find(memory, (uintptr_t)at, 1);

	if (range)
		range->end = 0;
	pthread_mutex_unlock(&lock);
}

/*
 * Existing registrations, allocations, events, streams and contexts; complaints; copies; the largest
 * number of registered bytes since the last call.
 */
void double_counts(uint64_t counts[8], char *text, size_t len);
void double_counts(uint64_t counts[8], char *text, size_t len)
{
	pthread_mutex_lock(&lock);
	memset(counts, 0, 8 * sizeof(*counts));
	for (int i = 0; i < MOST; i++) {
		counts[0] += registered[i].end != 0;
		counts[1] += memory[i].end != 0 && memory[i].device >= 0;
	}
	counts[2] = events;
	counts[3] = streams;
	counts[4] = contexts[0].retained + contexts[1].retained;
	counts[5] = complaints;
	counts[6] = copies;
	counts[7] = registered_peak;
	registered_peak = registered_now;
	snprintf(text, len, "%s", complaint);
	pthread_mutex_unlock(&lock);
}
