/*
 * parts TO SOURCE   saves the file SOURCE, which is on a tmpfs, as TO in three parts: the first 100 and the last 5000
 *		     bytes from memory of this process, and the bytes between them from the file.
 *
 * Fails like the command: with one line and exit status 1.
 */
#define _GNU_SOURCE
#include <dmafile.h>
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define HEAD 100
#define TAIL 5000

int main(int argc, char **argv)
{
	char head[HEAD], tail[TAIL], why[1024];
	struct dmafile_part parts[3] = { 0 };
	off_t size;
	int fd;

	if (argc != 3)
		errx(2, "parts TO SOURCE");
	fd = open(argv[2], O_RDONLY | O_CLOEXEC);
	size = lseek(fd, 0, SEEK_END);
	if (pread(fd, head, HEAD, 0) != HEAD || pread(fd, tail, TAIL, size - TAIL) != TAIL)
		err(2, "%s", argv[2]);
	parts[0] = (struct dmafile_part){ .memory = head, .bytes = HEAD };
	parts[1] = (struct dmafile_part){ .fd = fd, .offset = HEAD, .bytes = size - HEAD - TAIL };
	parts[2] = (struct dmafile_part){ .memory = tail, .bytes = TAIL };
	if (dmafile_save(parts, 3, argv[1], NULL, NULL) >= 0)
		return 0;
	dmafile_strerror_r(why, sizeof(why));
	fprintf(stderr, "dmafile: %s\n", why);
	return 1;
}
