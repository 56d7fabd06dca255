/* SPDX-License-Identifier: GPL-2.0-only */
/* Files of the kernel, for the programs in this folder */
#ifndef _FIX_H
#define _FIX_H

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static inline void set(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_TRUNC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		perror(path);
	close(fd);
}

/* The first number that a line of a file has in this format, or -1 */
static inline long value(const char *path, const char *format)
{
	FILE *file = fopen(path, "r");
	char line[200];
	long number = -1;

	while (fgets(line, sizeof(line), file))
		if (sscanf(line, format, &number) == 1)
			break;
	fclose(file);
	return number;
}

#endif
