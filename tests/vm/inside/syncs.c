/*
 * syncs PLAN FILE COMMAND...   runs COMMAND and intercepts its calls of fsync, fdatasync, syncfs and sync. Each letter
 * of PLAN controls one call, in order; later calls are not changed.
 *
 *	k   keep: the call is made
 *	b   bystander: another program syncs FILE, on the same file system, and the journal is committed; then the call
 *	    is made
 *	s   skip: the call returns 0 and does nothing
 *	x   bystander, then skip
 *
 * The exit status is that of COMMAND, or 99 if PLAN has more letters than there were calls: then it tested nothing.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/btrfs.h>
#include <linux/f2fs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ASK(number) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), \
	BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF)

/* Installs the filter; returns the descriptor on which calls of this process are reported from now on. */
static int supervise(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ASK(SYS_fsync),
		ASK(SYS_fdatasync),
		ASK(SYS_syncfs),
		ASK(SYS_sync),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(filter) / sizeof(*filter), .filter = filter };
	int fd;

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		err(98, "no_new_privs");
	/* Only a fatal signal interrupts a reported call: a repeated call would get the next letter. */
	fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
		     SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, &program);
	if (fd < 0)
		err(98, "seccomp");
	return fd;
}

/* Passes a descriptor to the parent process. */
static void send_fd(int socket, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr header;
	} control = { .header = { .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) } };
	struct iovec byte = { .iov_base = "", .iov_len = 1 };
	struct msghdr message = {
		.msg_iov = &byte,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};

	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	if (sendmsg(socket, &message, 0) != 1)
		err(98, "sendmsg");
}

static int receive_fd(int socket)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr header;
	} control;
	char byte;
	struct iovec room = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr message = {
		.msg_iov = &room,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	int fd;

	if (recvmsg(socket, &message, 0) != 1 || !CMSG_FIRSTHDR(&message))
		errx(98, "no supervision");
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
	return fd;
}

/*
 * What other programs may do at any time on the same file system. Btrfs and F2FS sync files separately, so this
 * requests the commits that they make every 30 or 60 seconds. Neither of them writes data of other files.
 */
static void bystander(const char *path)
{
	static char byte;
	__u64 transaction;
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);

	byte++;
	if (fd < 0 || pwrite(fd, &byte, 1, 0) != 1 || fsync(fd))
		err(98, "%s", path);
	if (!ioctl(fd, BTRFS_IOC_START_SYNC, &transaction))
		if (ioctl(fd, BTRFS_IOC_WAIT_SYNC, &transaction))
			err(98, "BTRFS_IOC_WAIT_SYNC");
	if (ioctl(fd, F2FS_IOC_WRITE_CHECKPOINT) && errno != ENOTTY)
		err(98, "F2FS_IOC_WRITE_CHECKPOINT");
	close(fd);
}

/* Returns false if the call was interrupted. */
static bool answer(int listener, char letter, const char *path)
{
	struct seccomp_notif call = { 0 };
	struct seccomp_notif_resp response = { 0 };

	if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call)) {
		if (errno == ENOENT)
			return false;
		err(98, "SECCOMP_IOCTL_NOTIF_RECV");
	}
	if (letter == 'b' || letter == 'x')
		bystander(path);
	response.id = call.id;
	if (letter == 'k' || letter == 'b')
		response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
	if (!ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response))
		return true;
	if (errno != ENOENT)
		err(98, "SECCOMP_IOCTL_NOTIF_SEND");
	return false;
}

int main(int argc, char **argv)
{
	int pair[2], listener, status;
	const char *letter;
	pid_t child;

	if (argc < 4 || argv[1][strspn(argv[1], "kbsx")])
		errx(98, "syncs PLAN FILE COMMAND...");
	letter = argv[1];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		err(98, "socketpair");
	child = fork();
	if (child < 0)
		err(98, "fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		listener = supervise();
		send_fd(pair[1], listener);
		close(listener);
		execv(argv[3], argv + 3);
		err(127, "%s", argv[3]);
	}
	close(pair[1]);
	listener = receive_fd(pair[0]);
	for (;;) {
		struct pollfd ready = { .fd = listener, .events = POLLIN };

		if (poll(&ready, 1, -1) < 0)
			err(98, "poll");
		if (ready.revents & POLLIN) {
			if (answer(listener, *letter ? *letter : 'k', argv[2]) && *letter)
				letter++;
		} else if (ready.revents) {
			break;
		}
	}
	if (waitpid(child, &status, 0) != child)
		err(98, "waitpid");
	if (*letter)
		return 99;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
