/*
 * count FILE COMMAND...   writes to FILE how many instructions the whole machine executed while COMMAND ran, on one
 * CPU under QEMU's `-icount shift=0,sleep=off`: there, one instruction is one nanosecond of the machine's time.
 *
 * An idle CPU lets time pass without instructions. So a child is made to spin in what would be idle time, and counts
 * its turns, which are two instructions each: what it executed is the time that was not COMMAND's, nor the kernel's.
 */
#define _GNU_SOURCE
#include <err.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile uint64_t *turns;

/* Both at once: on the only CPU, the spinner doesn't run while this does. */
static int64_t spent(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_RAW, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec - 2 * (int64_t)*turns;
}

static void spin(void)
{
	struct sched_param none = { 0 };

	if (sched_setscheduler(0, SCHED_IDLE, &none))
		err(126, "SCHED_IDLE");
	__asm__ volatile("1: incq (%0)\n\tjmp 1b" : : "r"(turns) : "memory");
	__builtin_unreachable();
}

int main(int argc, char **argv)
{
	int64_t start, end;
	pid_t spinner, command;
	int status;
	FILE *file;

	if (argc < 3)
		errx(126, "count FILE COMMAND...");
	turns = mmap(NULL, sizeof(*turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (turns == MAP_FAILED)
		err(126, "mmap");
	spinner = fork();
	if (spinner < 0)
		err(126, "fork");
	if (!spinner)
		spin();
	/* What the boot left to be done is not COMMAND's. */
	sleep(2);

	start = spent();
	command = fork();
	if (command < 0)
		err(126, "fork");
	if (!command) {
		execvp(argv[2], argv + 2);
		err(127, "%s", argv[2]);
	}
	while (waitpid(command, &status, 0) != command)
		;
	end = spent();
	kill(spinner, SIGKILL);

	file = fopen(argv[1], "w");
	if (!file || fprintf(file, "%lld\n", (long long)(end - start)) < 0 || fclose(file))
		err(126, "%s", argv[1]);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
