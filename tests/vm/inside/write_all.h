/* Writes all bytes to standard output. */
#include <err.h>
#include <stddef.h>
#include <unistd.h>

static void write_all(const char *data, size_t left)
{
	while (left) {
		ssize_t wrote = write(STDOUT_FILENO, data, left);

		if (wrote < 0)
			err(1, "write");
		data += wrote;
		left -= wrote;
	}
}
