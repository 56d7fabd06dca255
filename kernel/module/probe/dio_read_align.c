// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.14 a separate, smaller alignment may be reported for direct reads. */
#include <linux/stat.h>

u32 probe(const struct kstat *stat);

u32 probe(const struct kstat *stat)
{
	return stat->dio_read_offset_align;
}
