/*
 * count COMMAND...   runs COMMAND between two marks, and exits with its status. Linked statically, so that loading it
 * reads the same few bytes on any machine.
 */
#define _GNU_SOURCE
#include <err.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mark.h"

int main(int argc, char **argv)
{
	pid_t command;
	int status;

	if (argc < 2)
		errx(126, "count COMMAND...");
	/* Work left over from booting must not count as COMMAND's. */
	sleep(2);

	mark(MARK_BEGIN);
	command = fork();
	if (command < 0)
		err(126, "fork");
	if (!command) {
		execvp(argv[1], argv + 1);
		err(127, "%s", argv[1]);
	}
	while (waitpid(command, &status, 0) != command)
		;
	mark(MARK_END);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
