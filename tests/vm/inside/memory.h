/* For programs in machines: a file as memory. */
#include <err.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

/* A memfd with the bytes of a file. */
static int memory_of(const char *path)
{
	int file = open(path, O_RDONLY | O_CLOEXEC), memory = memfd_create("memory", MFD_CLOEXEC);
	struct stat stat;
	off_t at = 0;

	if (file < 0 || memory < 0 || fstat(file, &stat))
		err(1, "%s", path);
	while (at < stat.st_size)
		if (sendfile(memory, file, &at, stat.st_size - at) <= 0)
			err(1, "%s", path);
	close(file);
	return memory;
}
