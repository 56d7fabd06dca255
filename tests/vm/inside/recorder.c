/*
 * recorder PATH SOURCE METHOD IO ROTATE   records parts of SOURCE to PATH.
 *
 * SOURCE is a file on a tmpfs, or the number of a descriptor.
 * METHOD and IO are values of the command line, ROTATE the maximum size of a file, or 0. Records are only synced on
 * request. Prints `started`, then executes commands from standard input, and answers each with one line:
 *
 *	append OFFSET LENGTH   appends a record, with its number as tag and timestamp; the answer is its number
 *	wait N                 waits until record N is written
 *	sync                   waits until all records are acknowledged; the answer is their number
 *	finish                 like sync, and the program ends
 *
 * The answer to a command that fails is `failed: ` and the message of the library.
 */
#define _GNU_SOURCE
#include <dmafile.h>
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void say(int64_t answer)
{
	char why[1024];

	if (answer >= 0) {
		printf("%lld\n", (long long)answer);
		return;
	}
	dmafile_strerror_r(why, sizeof(why));
	printf("failed: %s\n", why);
}

int main(int argc, char **argv)
{
	struct dmafile_recorder_options how = { .size = sizeof(how), .flags = DMAFILE_RECORD_NO_INTERVAL };
	struct dmafile_recorder_buffer *buffer;
	struct dmafile_recorder *recorder;
	struct dmafile_recorded recorded = { 0 };
	unsigned long long at, length;
	int64_t next = 0, done;
	char line[256];
	int source;

	if (argc != 6)
		errx(1, "recorder PATH SOURCE METHOD IO ROTATE");
	setvbuf(stdout, NULL, _IOLBF, 0);
	how.method = argv[3];
	how.io = argv[4];
	how.rotate_bytes = strtoull(argv[5], NULL, 10);
	source = argv[2][strspn(argv[2], "0123456789")] ? open(argv[2], O_RDWR | O_CLOEXEC) : atoi(argv[2]);
	done = dmafile_recorder_attach(source, &buffer);
	if (!done)
		done = dmafile_recorder_new(argv[1], &how, &recorder);
	if (done) {
		say(done);
		return 1;
	}
	puts("started");
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "append %llu %llu", &at, &length) == 2) {
			done = dmafile_recorder_append(recorder, buffer, at, length, next, next);
			next += done >= 0;
			say(done);
		} else if (sscanf(line, "wait %llu", &at) == 1) {
			say(dmafile_recorder_wait(recorder, at, -1));
		} else if (!strcmp(line, "sync\n")) {
			done = dmafile_recorder_sync(recorder);
			if (!done)
				done = dmafile_recorder_recorded(recorder, &recorded);
			say(done ? done : (int64_t)recorded.durable);
		} else if (!strcmp(line, "finish\n")) {
			done = dmafile_recorder_finish(recorder, &recorded);
			say(done ? done : (int64_t)recorded.durable);
			return done != 0;
		} else {
			errx(1, "what is %s", line);
		}
	}
	errx(1, "the input ended without: finish");
}
