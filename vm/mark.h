/*
 * An instruction that does nothing, `nopl disp32(%rax,%rax,1)`, whose displacement no compiler would choose: counter.c
 * writes down, each time that it is executed, N (0 to 255) and what has been executed until then.
 */
#ifndef MARK_H
#define MARK_H

#define MARK_BYTES 0x0f, 0x1f, 0x84, 0x00, 0x64, 0x6d, 0x66

#define MARK_TEXT_(...) #__VA_ARGS__
#define MARK_TEXT(...) MARK_TEXT_(__VA_ARGS__)
#define mark(n) __asm__ volatile(".byte " MARK_TEXT(MARK_BYTES) ", %c0" : : "i"(n) : "memory")

/* Those of count.c; what it runs has the others. */
enum { MARK_BEGIN = 254, MARK_END = 255 };

#endif
