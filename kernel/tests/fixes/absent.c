// SPDX-License-Identifier: GPL-2.0-only
/* Writes a page that is not present yet to a new file. Usage: absent FILE */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char *source = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = argc > 1 ? open(argv[1], O_CREAT | O_RDWR | O_EXCL, 0600) : -1;
	struct statvfs fs;
	struct stat stat;
	ssize_t written;

	if (fd < 0) {
		perror("file");
		return 2;
	}
	errno = 0;
	written = write(fd, source, 4096);
	printf("write() of 4096 bytes: %zd (%s)\n", written, strerror(errno));
	fstat(fd, &stat);
	fstatvfs(fd, &fs);
	printf("size of the file: %lld, free blocks: %lu of %lu\n", (long long)stat.st_size,
	       fs.f_bfree, fs.f_blocks);
	return written != 4096 || stat.st_size != 4096;
}
