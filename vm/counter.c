/*
 * A plugin for QEMU before 9.0 (version 1 of the plugin interface). It counts the instructions that the one CPU
 * executes. At each mark (mark.h) it appends a line to FILE: the mark's number, and the counts so far in user space and
 * in the kernel.
 *
 *	-plugin counter.so,out=FILE
 *
 * An instruction counts when it begins: one that faults counts again when it is retried. A string instruction
 * (`rep movsq`) counts once for each repetition, because QEMU translates it into a loop. An idle CPU executes nothing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "mark.h"

/* The declarations needed from qemu-plugin.h, which Debian 12 does not package. */
typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
		void (*translated)(qemu_plugin_id_t id, struct qemu_plugin_tb *block));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *insn, enum qemu_plugin_op op,
		void *counter, uint64_t by);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn,
		void (*executed)(unsigned int cpu, void *data), enum qemu_plugin_cb_flags flags, void *data);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static const uint8_t magic[] = { MARK_BYTES };
/* Not atomic: there is only one CPU. */
static uint64_t user, kernel;
static FILE *out;

static void marked(unsigned int cpu, void *number)
{
	(void)cpu;
	fprintf(out, "%u %llu %llu\n", (unsigned int)(uintptr_t)number, (unsigned long long)user,
		(unsigned long long)kernel);
	/* The machine may be killed at any time. */
	fflush(out);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
	size_t number = qemu_plugin_tb_n_insns(block), i;

	(void)id;
	for (i = 0; i < number; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(block, i);
		const uint8_t *bytes = qemu_plugin_insn_data(insn);
		/* Kernel code is in the upper half of the address space. */
		bool upper = qemu_plugin_insn_vaddr(insn) >> 63;

		/*
		 * For each instruction, not for each block: an interrupt or a fault may end a block early. The whole
		 * block would count, and then its rest again.
		 */
		qemu_plugin_register_vcpu_insn_exec_inline(insn, QEMU_PLUGIN_INLINE_ADD_U64,
							   upper ? &kernel : &user, 1);
		if (qemu_plugin_insn_size(insn) == sizeof(magic) + 1 && !memcmp(bytes, magic, sizeof(magic)))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, QEMU_PLUGIN_CB_NO_REGS,
							       (void *)(uintptr_t)bytes[sizeof(magic)]);
	}
}

__attribute__((visibility("default")))
int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
	(void)info;
	if (argc != 1 || strncmp(argv[0], "out=", 4)) {
		fputs("counter: the one argument is out=FILE\n", stderr);
		return -1;
	}
	out = fopen(argv[0] + 4, "a");
	if (!out) {
		perror(argv[0] + 4);
		return -1;
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
