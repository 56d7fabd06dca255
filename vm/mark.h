/*
 * mark(N), N from 0 to 255, is an instruction that does nothing: `nopl disp32(%rax,%rax,1)`, with a displacement that
 * no compiler would choose. Each time it is executed, counter.c writes N and the number of instructions so far.
 */
#ifndef MARK_H
#define MARK_H

#define MARK_BYTES 0x0f, 0x1f, 0x84, 0x00, 0x64, 0x6d, 0x66

#define MARK_TEXT_(...) #__VA_ARGS__
#define MARK_TEXT(...) MARK_TEXT_(__VA_ARGS__)
#define mark(n) __asm__ volatile(".byte " MARK_TEXT(MARK_BYTES) ", %c0" : : "i"(n) : "memory")

/* Used by count.c; all others are for the programs that it runs. */
enum { MARK_BEGIN = 254, MARK_END = 255 };

#endif
