/* SPDX-License-Identifier: GPL-2.0-only */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM pin_owner

#if !defined(_TRACE_PIN_OWNER_H) || defined(TRACE_HEADER_MULTI_READ)
#define _TRACE_PIN_OWNER_H

#include <linux/pid.h>
#include <linux/timekeeping.h>
#include <linux/tracepoint.h>

/* Defined in mm/pin_owner.h, and used only by mm/pin_*.c */
struct pin_region;

/* Long-term pins were added to a new or existing region. */
TRACE_EVENT(pin_owner_region,
	TP_PROTO(const struct pin_region *region),
	TP_ARGS(region),
	TP_STRUCT__entry(
		__field(u32, id)
		__field(pid_t, tgid)
		__field(unsigned long, start)
		__field(unsigned long, pages)
		__field(unsigned long, site)
	),
	TP_fast_assign(
		__entry->id = region->id;
		__entry->tgid = pid_nr(region->tgid);
		__entry->start = region->start;
		__entry->pages = region->pages;
		__entry->site = region->site;
	),
	TP_printk("region=%u tgid=%d start=%lx pages=%lu site=%ps", __entry->id,
		  __entry->tgid, __entry->start, __entry->pages, (void *)__entry->site)
);

/* The last pin of a region was released. */
TRACE_EVENT(pin_owner_release,
	TP_PROTO(const struct pin_region *region),
	TP_ARGS(region),
	TP_STRUCT__entry(
		__field(u32, id)
		__field(pid_t, tgid)
		__field(u64, age)
		__field(unsigned long, unpinner)
	),
	TP_fast_assign(
		__entry->id = region->id;
		__entry->tgid = pid_nr(region->tgid);
		__entry->age = ktime_get_boot_fast_ns() - region->since;
		__entry->unpinner = region->unpinner;
	),
	TP_printk("region=%u tgid=%d age=%llu ns by=%ps", __entry->id, __entry->tgid,
		  __entry->age, (void *)__entry->unpinner)
);

/* Pins and unpins do not balance; kind is an enum pin_stat. */
TRACE_EVENT(pin_owner_mismatch,
	TP_PROTO(unsigned int kind, unsigned long site),
	TP_ARGS(kind, site),
	TP_STRUCT__entry(
		__field(unsigned int, kind)
		__field(unsigned long, site)
	),
	TP_fast_assign(
		__entry->kind = kind;
		__entry->site = site;
	),
	TP_printk("kind=%u by=%ps", __entry->kind, (void *)__entry->site)
);

/* A folio could not be moved. */
TRACE_EVENT(pin_owner_blocked,
	TP_PROTO(unsigned long pfn, const char *why, int pins, u32 region),
	TP_ARGS(pfn, why, pins, region),
	TP_STRUCT__entry(
		__field(unsigned long, pfn)
		__string(why, why)
		__field(int, pins)
		__field(u32, region)
	),
	TP_fast_assign(
		__entry->pfn = pfn;
		__assign_str(why);
		__entry->pins = pins;
		__entry->region = region;
	),
	TP_printk("pfn=%#lx why=%s pins=%d region=%u", __entry->pfn, __get_str(why),
		  __entry->pins, __entry->region)
);

#endif /* _TRACE_PIN_OWNER_H */

#include <trace/define_trace.h>
