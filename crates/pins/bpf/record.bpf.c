// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Records who pins memory: `dmafile pins --record` (src/bpf.rs loads it and reads its maps).
 *
 * Every pin passes through the functions of mm/gup.c that grab a folio, every unpin through the one that puts it. Each
 * pinned folio has an entry of 8 bytes: how many pins it has, and the burst that pinned it last for a long term. A
 * burst is what one task pins from one place within two jiffies; it has the process, the time and the call stack, so
 * that these are found out once for thousands of pages. Entries lie in blocks of 64, one for each 256 KiB of physical
 * memory in which something is pinned.
 *
 * Nothing here takes a lock, but for the table of memfd_pin_folios. An entry is changed by compare-and-exchange. A block or burst that is no longer used is
 * reused by the CPU that first exchanges its user count of 0 for DEAD. Until then a block keeps its region, so that the
 * block is found when the same memory is pinned again.
 */

typedef signed int s32;
typedef unsigned int u32;
typedef signed long long s64;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))

/* Parts of the kernel's types; the loader finds out where their fields are (CO-RE). */
#define RELOCATED __attribute__((preserve_access_index))
typedef struct { int counter; } atomic_t;
struct page { u64 flags; };		/* not a field, but the first word, whose type changed */
struct folio { atomic_t _refcount, _pincount; } RELOCATED;
#ifdef __TARGET_ARCH_arm64
struct pt_regs { u64 regs[31]; s32 syscallno; } RELOCATED;
#define SYSCALL(user) ((user)->syscallno)
#define ARGUMENT(user, n) ((user)->regs[n])
#else
struct pt_regs { u64 di, si, dx, orig_ax; } RELOCATED;
#define SYSCALL(user) ((user)->orig_ax)
#define ARGUMENT(user, n) ((n) == 0 ? (user)->di : (n) == 1 ? (user)->si : (user)->dx)
#endif
struct task_struct { struct task_struct *group_leader; u64 start_boottime; } RELOCATED;

/* enum bpf_map_type and the numbers of helpers: include/uapi/linux/bpf.h */
enum { HASH = 1, ARRAY = 2, PERCPU_ARRAY = 6, BPF_F_NO_PREALLOC = 1, BPF_NOEXIST = 1, BPF_EXIST = 2 };
static void *(*const map_lookup)(void *map, const void *key) = (void *)1;
static long (*const map_update)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*const map_delete)(void *map, const void *key) = (void *)3;
static u64 (*const get_pid_tgid)(void) = (void *)14;
static u64 (*const get_uid_gid)(void) = (void *)15;
static long (*const get_comm)(void *buffer, u32 size) = (void *)16;
static struct pt_regs *(*const get_user_regs)(struct task_struct *task) = (void *)175;
static struct task_struct *(*const get_task)(void) = (void *)158;
static long (*const get_stack)(void *ctx, void *buffer, u32 size, u64 flags) = (void *)67;
static u64 (*const get_cgroup_id)(void) = (void *)80;
static long (*const read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static u64 (*const get_jiffies)(void) = (void *)118;
static u64 (*const get_boot_ns)(void) = (void *)125;
static long (*const loop)(u32 count, void *body, void *data, u64 flags) = (void *)181;
static long (*const get_arg)(void *ctx, u32 n, u64 *value) = (void *)183;
static long (*const get_return)(void *ctx, u64 *value) = (void *)184;

#define BLOCK_BITS 6
#define BLOCK_ENTRIES (1 << BLOCK_BITS)
#define STACK_DEPTH 16
#define PIN_BIAS 1024
/* How often a compare-and-exchange that others disturb is repeated. */
#define ATTEMPTS 16
#define DEAD (1LL << 62)
/*
 * How many blocks or bursts are looked at to find one that is not used, and not again in the same jiffy if there is none:
 * where nearly all are used, pinning must not become slow.
 */
#define LOOKS 4096

/* Set by the loader. */
const volatile u64 first_page;		/* the address of frame 0's struct page */
const volatile u32 page_shift;		/* its size, as a power of two */
const volatile u64 head_mask;		/* of its flags, for the first page of a large folio */
const volatile u32 compound;		/* where a page says which folio it belongs to */
const volatile u32 memfd_pins;		/* pins by memfd_pin_folios that no other program here sees: 1 or 0 */
const volatile u64 last_page;
const volatile u32 page_grabbed;	/* what try_grab_page returns when it has: 1 (true) up to 6.1, then 0 */
const volatile u32 page_result;		/* the bits of what it returns that are defined */
const volatile u32 foll_pin;
const volatile u32 foll_recorded;	/* flags of the pins that are recorded */
const volatile u32 most_blocks;
const volatile u32 most_bursts;

/* An entry: the pins above, the number of the burst below; 0 if nothing is recorded. */
#define ENTRY(pins, burst) ((u64)(u32)(pins) << 32 | (burst))
#define PINS(entry) ((u32)((entry) >> 32))
#define BURST(entry) ((u32)(entry))

/* Blocks and bursts begin with the number of their users. */
struct block {
	s64 users;			/* entries that are not 0 */
	u64 region;
	u64 entries[BLOCK_ENTRIES];
};

struct burst {
	s64 users;			/* entries, and the CPU whose latest burst it is */
	u64 task;			/* thread ID below, process ID above */
	u64 place;			/* a place on the task's stack, which tells apart what one system call does */
	u64 call;			/* the number and the arguments of the system call, mixed */
	u64 jiffies;
	u64 time;			/* ns since boot */
	u64 born;			/* the same of the process */
	u64 cgroup;
	u64 uid;
	u64 depth;			/* words of the stack that are set */
	char name[16];
	u64 stack[STACK_DEPTH];
};

struct counts {
	u64 block;			/* how often a block was looked at, to take it; block 0 is none */
	u64 burst;
	u64 no_block;			/* folios that are not recorded because all blocks are used */
	u64 no_burst;
	u64 disturbed;			/* changes that were given up */
	u64 beyond;			/* folios of memory that was added since the beginning */
	u64 full;			/* the jiffy in which no block was found, plus 1 */
	u64 full_burst;			/* the same of bursts */
};

struct { int (*type)[ARRAY]; int (*max_entries)[1]; u32 *key; u32 *value; } regions SEC(".maps");
struct { int (*type)[ARRAY]; int (*max_entries)[1]; u32 *key; struct block *value; } blocks SEC(".maps");
struct { int (*type)[ARRAY]; int (*max_entries)[1]; u32 *key; struct burst *value; } bursts SEC(".maps");
struct { int (*type)[PERCPU_ARRAY]; int (*max_entries)[1]; u32 *key; u32 *value; } latest SEC(".maps");
struct { int (*type)[ARRAY]; int (*max_entries)[1]; u32 *key; struct counts *value; } counted SEC(".maps");
struct memfd_mark {
	u64 place;			/* on the task's stack */
	u64 call;			/* as in a burst */
};

/* Tasks in memfd_pin_folios if memfd_pins is 1. Allocated when there are some. */
struct {
	int (*type)[HASH];
	int (*map_flags)[BPF_F_NO_PREALLOC];
	int (*max_entries)[4096];
	u64 *key;
	struct memfd_mark *value;
} in_memfd SEC(".maps");

/* Their number, which is nearly always 0. */
static s64 memfd_calls;

char license_text[] SEC("license") = "Dual MIT/GPL";

/* An argument that is a number; pointers have to be asked for, because the verifier lets nobody calculate with them. */
#define NUMBER(ctx, n) (((const u64 *)(ctx))[n])

INLINE void *at(void *map, u32 key)
{
	return map_lookup(map, &key);
}

#define COUNT(what, number)							\
	do {									\
		struct counts *counts_ = at(&counted, 0);			\
										\
		if (counts_)							\
			__sync_fetch_and_add(&counts_->what, number);		\
	} while (0)

/* Gives a use back. */
INLINE void release(s64 *users)
{
	__sync_fetch_and_add(users, -1);
}

/* Takes what nobody uses, so that its users are DEAD. */
INLINE int take(s64 *users)
{
	return !READ_ONCE(*users) && !__sync_val_compare_and_swap(users, 0, DEAD);
}

/* Each number but 0 in turn, in an order in which those that one owner uses do not follow each other. */
INLINE u32 next_number(u64 *turn, u32 most)
{
	/* A prime, and larger than any `most`. */
	return __sync_fetch_and_add(turn, 1) * 2654435761ULL % (most - 1) + 1;
}

INLINE void release_burst(u32 number)
{
	struct burst *burst = at(&bursts, number);

	if (burst)
		release(&burst->users);
}

/* Takes the next block or burst in turn if nobody uses it: the body of a loop that ends with one. */
INLINE long take_next(void *map, u64 *turn, u32 most, u32 *taken)
{
	u32 number = next_number(turn, most);
	s64 *users = at(map, number);

	if (!users || !take(users))
		return 0;
	*taken = number;
	return 1;
}

static long take_block(__attribute__((unused)) u32 index, void *taken)
{
	struct counts *counts = at(&counted, 0);

	return counts ? take_next(&blocks, &counts->block, most_blocks, taken) : 1;
}

static long take_burst(__attribute__((unused)) u32 index, void *taken)
{
	struct counts *counts = at(&counted, 0);

	return counts ? take_next(&bursts, &counts->burst, most_bursts, taken) : 1;
}

/* What tells the system calls of a task apart; nothing of kernel threads, which do what one of them asked for. */
INLINE u64 system_call(void)
{
	struct pt_regs *user = get_user_regs(get_task());

	return SYSCALL(user) ^ ARGUMENT(user, 0) << 16 ^ ARGUMENT(user, 1) << 32 ^ ARGUMENT(user, 2);
}

/* Makes a burst; the CPU whose latest it becomes and the caller's entry use it. */
static __attribute__((noinline)) u32 new_burst(void *ctx, u32 *mine)
{
	struct counts *counts = at(&counted, 0);
	struct task_struct *task = get_task();
	u64 jiffy = get_jiffies() + 1;
	struct burst *burst;
	long depth;
	u32 number = 0, old;

	if (!counts || READ_ONCE(counts->full_burst) == jiffy)
		return 0;
	loop(most_bursts < LOOKS ? most_bursts : LOOKS, take_burst, &number, 0);
	burst = at(&bursts, number);
	if (!number || !burst) {
		WRITE_ONCE(counts->full_burst, jiffy);
		return 0;
	}
	burst->task = get_pid_tgid();
	burst->place = (u64)ctx;
	burst->call = system_call();
	burst->jiffies = get_jiffies();
	burst->time = get_boot_ns();
	burst->born = task->group_leader->start_boottime;
	burst->cgroup = get_cgroup_id();
	burst->uid = (u32)get_uid_gid();
	get_comm(burst->name, sizeof(burst->name));
	depth = get_stack(ctx, burst->stack, sizeof(burst->stack), 0);
	burst->depth = depth > 0 ? depth / sizeof(u64) : 0;
	/* Others may look at it for a moment, so it is not set. */
	__sync_fetch_and_add(&burst->users, 2 - DEAD);
	old = __sync_lock_test_and_set(mine, number);
	if (old)
		release_burst(old);
	return number;
}

/* The burst that this task's pin belongs to, used once more; 0 if there is no room for another. */
INLINE u32 use_burst(void *ctx)
{
	u32 *mine = at(&latest, 0);
	struct burst *burst;
	u32 number;

	if (!mine)
		return 0;
	number = READ_ONCE(*mine);
	burst = at(&bursts, number);
	if (number && burst) {
		__sync_fetch_and_add(&burst->users, 1);
		/* Another task may have run on this CPU; the burst stays this one as long as the CPU uses it. */
		if (READ_ONCE(*mine) == number && burst->task == get_pid_tgid() &&
		    burst->place == (u64)ctx && burst->call == system_call() && get_jiffies() - burst->jiffies < 2)
			return number;
		release(&burst->users);
	}
	return new_burst(ctx, mine);
}

/* Uses this block once more if it is that of the region. */
INLINE int use_numbered(struct block *block, u32 *slot, u32 number, u32 region)
{
	s64 users;

	if (!number || !block)
		return 0;
	users = __sync_fetch_and_add(&block->users, 1);
	/* It may have become that of another region before, and of this one again, but in another block's place. */
	if (users < DEAD / 2 && READ_ONCE(block->region) == region && READ_ONCE(*slot) == number)
		return 1;
	release(&block->users);
	return 0;
}

/* Takes a block, used once, for a region that has none; 0 if all are used, or others were faster. */
INLINE u32 new_block(u32 *slot, u32 region)
{
	struct counts *counts = at(&counted, 0);
	u64 jiffy = get_jiffies() + 1;
	struct block *block;
	u32 number = 0, *before;

	if (!counts || READ_ONCE(counts->full) == jiffy)
		return 0;
	loop(most_blocks < LOOKS ? most_blocks : LOOKS, take_block, &number, 0);
	block = at(&blocks, number);
	if (!number || !block) {
		WRITE_ONCE(counts->full, jiffy);
		return 0;
	}
	before = at(&regions, block->region);
	if (before)
		__sync_val_compare_and_swap(before, number, 0);
	WRITE_ONCE(block->region, region);
	/* As for bursts. */
	__sync_fetch_and_add(&block->users, 1 - DEAD);
	if (!__sync_val_compare_and_swap(slot, 0, number))
		return number;
	release(&block->users);
	return 0;
}

/* The block of a region, used once more; 0 if there is none and no room for another, or it is just being taken. */
static __attribute__((noinline)) u32 use_or_make_block(u32 region)
{
	u32 *slot = at(&regions, region);
	u32 number;

	if (!slot)
		return 0;
	number = READ_ONCE(*slot);
	if (number)
		return use_numbered(at(&blocks, number), slot, number, region) ? number : 0;
	return new_block(slot, region);
}

/* The same, a few times: a block is being taken for a moment only. */
INLINE u32 use_block(u32 region)
{
	u32 number = use_or_make_block(region);

	if (!number)
		number = use_or_make_block(region);
	if (!number)
		number = use_or_make_block(region);
	return number;
}

INLINE u64 frame_of(u64 folio)
{
	return (folio - first_page) >> page_shift;
}

/* Pins that a folio with these fields has, those of others included; other references than pins are fewer than 1024. */
INLINE u32 pins_of(u64 flags, s32 references, s32 pins)
{
	if (!(flags & head_mask))
		pins = references > 0 ? (u32)references / PIN_BIAS : 0;
	return pins > 0 ? pins : 1;
}

/* The same of the folio at this address. */
INLINE u32 read_pins(u64 folio)
{
	struct folio *large = (void *)folio;
	s32 references = 0, pins = 0;
	u64 flags = 0;

	read_kernel(&flags, sizeof(flags), large);
	read_kernel(&references, sizeof(references), &large->_refcount.counter);
	if (flags & head_mask)
		read_kernel(&pins, sizeof(pins), &large->_pincount.counter);
	return pins_of(flags, references, pins);
}

INLINE u32 typed_pins(const struct folio *folio)
{
	u64 flags = ((const struct page *)folio)->flags;

	return pins_of(flags, folio->_refcount.counter, flags & head_mask ? folio->_pincount.counter : 0);
}

/*
 * Records that this burst has pinned a folio; uses the burst. `pins` is 0 if they are counted already. `typed` is as in
 * recount().
 */
INLINE void record(u64 folio, const struct folio *typed, u32 pins, u32 burst)
{
	u64 frame = frame_of(folio), old;
	u32 region = frame >> BLOCK_BITS, number;
	u32 *slot = at(&regions, region);
	struct block *block;
	u64 *entry;

	if (!slot) {
		release_burst(burst);
		COUNT(beyond, 1);
		return;
	}
	number = READ_ONCE(*slot);
	block = at(&blocks, number);
	if (!use_numbered(block, slot, number, region)) {
		number = use_block(region);
		block = at(&blocks, number);
	}
	if (!number || !block) {
		release_burst(burst);
		COUNT(no_block, 1);
		return;
	}
	entry = &block->entries[frame % BLOCK_ENTRIES];
	for (int i = 0; i < ATTEMPTS; i++) {
		u32 all;

		old = READ_ONCE(*entry);
		/* Those that other pins made, and whose unpins will be counted, too. */
		all = old ? PINS(old) + pins : typed ? typed_pins(typed) : read_pins(folio);
		if (__sync_val_compare_and_swap(entry, old, ENTRY(all, burst)) == old) {
			if (old) {
				release_burst(BURST(old));
				release(&block->users);
			}
			return;
		}
	}
	release(&block->users);
	release_burst(burst);
	COUNT(disturbed, 1);
}

/*
 * True if an unpin is the undo of a memfd_pin_folios that has failed, and whose pins were not counted. A mark may be left
 * over, because the program at the end of a call was missed; later system calls of that task are others.
 */
INLINE int is_undo(void *ctx)
{
	/* What interrupts the task runs on another stack, which is farther away, and unpins for others. */
	const u64 frames = 4096;
	u64 task = get_pid_tgid(), lowest;
	struct memfd_mark *mark = map_lookup(&in_memfd, &task);

	if (!mark || (u64)ctx >= mark->place || mark->call != system_call())
		return 0;
	lowest = mark->place - frames;
	/* Pointers may be compared, but not subtracted. */
	asm volatile("" : "+r"(lowest));
	return (u64)ctx > lowest;
}

/*
 * Counts pins, or fewer of them, if the folio has an entry. An unpin comes here before it is done, and a pin when it is,
 * so that the folio has at least the pins of its entry; what is more there (pins of others that were counted twice when
 * the entry was made) is corrected. `typed` is the folio, or NULL where the verifier does not know that it is one.
 */
INLINE void recount(void *ctx, u64 folio, const struct folio *typed, s32 change)
{
	u64 frame = frame_of(folio), old, new;
	u32 region = frame >> BLOCK_BITS, number;
	u32 *slot = at(&regions, region);
	struct block *block;
	u64 *entry;

	if (!slot)
		return;
	number = READ_ONCE(*slot);
	if (!number)
		return;
	block = at(&blocks, number);
	if (!block)
		return;
	entry = &block->entries[frame % BLOCK_ENTRIES];
	if (!READ_ONCE(*entry) || (memfd_pins && change < 0 && READ_ONCE(memfd_calls) && is_undo(ctx)) ||
	    !use_numbered(block, slot, number, region))
		return;
	for (int i = 0; i < ATTEMPTS; i++) {
		s64 pins;

		old = READ_ONCE(*entry);
		pins = PINS(old);
		if (change < 0) {
			u32 all = typed ? typed_pins(typed) : read_pins(folio);

			pins = pins < all ? pins : all;
		}
		pins += change;
		new = pins > 0 ? ENTRY(pins, BURST(old)) : 0;
		if (!old)
			goto done;
		if (__sync_val_compare_and_swap(entry, old, new) == old) {
			if (!new) {
				release_burst(BURST(old));
				release(&block->users);
			}
			goto done;
		}
	}
	COUNT(disturbed, 1);
done:
	release(&block->users);
}

/* The burst to record a pin with, used once; 0 if the pin is not recorded, but only counted. */
INLINE u32 wanted(void *ctx, u64 folio, u32 pins, u32 flags)
{
	u32 burst;

	if (!(flags & foll_recorded)) {
		recount(ctx, folio, 0, pins);
		return 0;
	}
	burst = use_burst(ctx);
	if (!burst)
		COUNT(no_burst, 1);
	return burst;
}

/* struct folio *grab(struct page *, int refs, unsigned int flags): try_grab_folio_fast, before 6.11 try_grab_folio */
SEC("fexit/grab_fast") int grab_fast(void *ctx)
{
	u32 pins = NUMBER(ctx, 1), flags = NUMBER(ctx, 2), burst;
	u64 folio;

	if (!(flags & foll_pin) || get_return(ctx, &folio) || !folio)
		return 0;
	burst = wanted(ctx, folio, pins, flags);
	if (burst)
		record(folio, ((struct folio **)ctx)[3], pins, burst);
	return 0;
}

/* int grab(struct folio *, int refs, unsigned int flags): try_grab_folio */
SEC("fexit/grab_slow") int grab_slow(void *ctx)
{
	u32 pins = NUMBER(ctx, 1), flags = NUMBER(ctx, 2), burst;
	u64 folio, failed;

	if (!(flags & foll_pin) || get_return(ctx, &failed) || (s32)failed || get_arg(ctx, 0, &folio))
		return 0;
	burst = wanted(ctx, folio, pins, flags);
	if (burst)
		record(folio, ((struct folio **)ctx)[0], pins, burst);
	return 0;
}

/* The folio of a page. A tail has, with bit 0 set, the address of the first page, or since 7.x a mask for its own. */
INLINE u64 folio_of(u64 page)
{
	u64 head = 0;

	read_kernel(&head, sizeof(head), (void *)page + compound);
	if (!(head & 1))
		return page;
	return head >= first_page && head < last_page ? head - 1 : page & head;
}

/* int or bool grab(struct page *, unsigned int flags): try_grab_page, before 6.11 */
SEC("fexit/grab_page") int grab_page(void *ctx)
{
	u32 flags = NUMBER(ctx, 1), burst;
	u64 page, folio, grabbed;

	if (!(flags & foll_pin) || get_return(ctx, &grabbed) || (grabbed & page_result) != page_grabbed ||
	    get_arg(ctx, 0, &page))
		return 0;
	folio = folio_of(page);
	burst = wanted(ctx, folio, 1, flags);
	if (burst)
		record(folio, 0, 1, burst);
	return 0;
}

/* void put(struct folio *, int refs, unsigned int flags): gup_put_folio */
SEC("fentry/put") int put(void *ctx)
{
	u64 folio;

	if (NUMBER(ctx, 2) & foll_pin && !get_arg(ctx, 0, &folio))
		recount(ctx, folio, ((struct folio **)ctx)[0], -(s32)NUMBER(ctx, 1));
	return 0;
}

/* The functions that pin or unpin what is pinned already, where the compiler has put the one above into them. */

/* void put(struct page *): unpin_user_page */
SEC("fentry/put_page") int put_page(void *ctx)
{
	u64 page;

	if (!get_arg(ctx, 0, &page))
		recount(ctx, folio_of(page), 0, -1);
	return 0;
}

/* void put(struct folio *): unpin_folio */
SEC("fentry/put_folio") int put_folio(void *ctx)
{
	u64 folio;

	if (!get_arg(ctx, 0, &folio))
		recount(ctx, folio, ((struct folio **)ctx)[0], -1);
	return 0;
}

/* void put(struct folio *, unsigned long pins): unpin_user_folio */
SEC("fentry/put_pins") int put_pins(void *ctx)
{
	u64 folio;

	if (!get_arg(ctx, 0, &folio))
		recount(ctx, folio, ((struct folio **)ctx)[0], -(s32)NUMBER(ctx, 1));
	return 0;
}

/* void add(struct folio *): folio_add_pin */
SEC("fentry/add_pin") int add_pin(void *ctx)
{
	u64 folio;

	if (!get_arg(ctx, 0, &folio))
		recount(ctx, folio, 0, 1);
	return 0;
}

/* int add(struct folio *, unsigned int pins): folio_add_pins */
SEC("fexit/add_pins") int add_pins(void *ctx)
{
	u64 folio, failed;

	if (!get_arg(ctx, 0, &folio) && !get_return(ctx, &failed) && !(s32)failed)
		recount(ctx, folio, 0, NUMBER(ctx, 1));
	return 0;
}

struct memfd_call {
	u64 folios;
	u32 burst;
};

static long record_memfd(u32 index, void *data)
{
	struct memfd_call *call = data;
	struct burst *burst = at(&bursts, call->burst);
	u64 folio = 0;

	if (!burst || read_kernel(&folio, sizeof(folio), (u64 *)call->folios + index) || !folio)
		return 0;
	__sync_fetch_and_add(&burst->users, 1);
	record(folio, 0, memfd_pins, call->burst);
	return 0;
}

/* The same function as below, where it grabs folios unseen. */
SEC("fentry/memfd_begin") int memfd_begin(void *ctx)
{
	struct memfd_mark mark = { .place = (u64)ctx, .call = system_call() };
	u64 task = get_pid_tgid();

	if (!map_update(&in_memfd, &task, &mark, BPF_NOEXIST))
		__sync_fetch_and_add(&memfd_calls, 1);
	else if (map_update(&in_memfd, &task, &mark, BPF_EXIST))
		/* No memory, or too many: if this call fails, its undo is counted. */
		COUNT(disturbed, 1);
	return 0;
}

/*
 * long memfd_pin_folios(struct file *, loff_t start, loff_t end, struct folio **, unsigned int most, pgoff_t *):
 * for a long term, although it grabs the folios without that flag
 */
SEC("fexit/memfd") int memfd(void *ctx)
{
	struct memfd_call call;
	u64 pinned, task = get_pid_tgid();

	if (memfd_pins && !map_delete(&in_memfd, &task))
		__sync_fetch_and_add(&memfd_calls, -1);
	if (get_arg(ctx, 3, &call.folios) || get_return(ctx, &pinned) || (s64)pinned <= 0)
		return 0;
	call.burst = use_burst(ctx);
	if (call.burst) {
		loop(pinned, record_memfd, &call, 0);
		release_burst(call.burst);
	} else {
		COUNT(no_burst, pinned);
	}
	return 0;
}
