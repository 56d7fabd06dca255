/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Freezes and thaws by the C library.
 *
 * Usage: face freeze SOCKET FOLDER PID...   prints the report
 *        face thaw FOLDER                   prints the process IDs, and waits for the processes
 */
#include "check.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

static void misused(void)
{
    struct dmafile_thawed *thawed = (struct dmafile_thawed *)1;
    struct dmafile_freeze_options how = {0};
    uint32_t self = 1;
    char *report;

    how.size = sizeof how;
    CHECK(dmafile_freeze(NULL, 1, "x", NULL, NULL) == -EINVAL);
    CHECK(dmafile_freeze(NULL, 0, "x", NULL, NULL) == -EINVAL && says("name a process"));
    CHECK(dmafile_freeze(&self, 1, NULL, NULL, &report) == -EINVAL && report == NULL);
    /* This process is a descendant of process 1. */
    CHECK(dmafile_freeze(&self, 1, "x", NULL, NULL) == -EINVAL && says("this process"));
    how.flags = 1ull << 40;
    CHECK(dmafile_freeze(&self, 1, "x", &how, NULL) == -EINVAL && says("unknown bits"));
    how.flags = DMAFILE_FREEZE_LEAVE_RUNNING;
    CHECK(dmafile_thaw("x", 0, &how, &thawed) == -EINVAL && thawed == NULL);
    CHECK(dmafile_thaw(NULL, 0, NULL, &thawed) == -EINVAL && thawed == NULL);
    CHECK(dmafile_thaw("none", 0, NULL, &thawed) == -ENOENT && thawed == NULL);
    CHECK(dmafile_thaw("x", 0, NULL, NULL) == -EINVAL);
    errno = 0;
    CHECK(dmafile_thawed_count(NULL) == 0 && errno == EINVAL);
    CHECK(dmafile_thawed_pid(NULL, 0) == 0 && dmafile_thawed_wait(NULL) == -EINVAL);
    dmafile_thawed_free(NULL);
}

int main(int argc, char **argv)
{
    /* For both: criu remembers it. */
    const char *criu[] = {"--tcp-close", NULL};
    struct dmafile_freeze_options how = {0};
    struct dmafile_thawed *thawed;
    uint32_t pids[16];
    size_t count;
    int status;

    misused();
    how.size = sizeof how;
    how.criu = criu;
    if (argc > 4 && !strcmp(argv[1], "freeze")) {
        const char *sockets[] = {argv[2], NULL};
        char *report;

        how.sockets = sockets;
        for (count = 0; count < (size_t)argc - 4; count++)
            pids[count] = (uint32_t)atoi(argv[4 + count]);
        CHECK(dmafile_freeze(pids, count, argv[3], &how, &report) == 0);
        puts(report);
        dmafile_report_free(report);
        return 0;
    }
    CHECK(argc == 3 && dmafile_thaw(argv[2], 60000, &how, &thawed) == 0);
    for (count = 0; count < dmafile_thawed_count(thawed); count++)
        printf("%" PRIu32 "\n", dmafile_thawed_pid(thawed, count));
    errno = 0;
    CHECK(dmafile_thawed_pid(thawed, count) == 0 && errno == ERANGE);
    fflush(stdout);
    status = dmafile_thawed_wait(thawed);
    CHECK(dmafile_thawed_wait(thawed) == -ECHILD);
    dmafile_thawed_free(thawed);
    return status;
}
