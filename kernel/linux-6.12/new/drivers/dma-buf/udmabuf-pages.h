/* SPDX-License-Identifier: GPL-2.0-only */
/* The memory of a udmabuf: pinned folios of memfds, with one entry per folio. */
#ifndef _UDMABUF_PAGES_H
#define _UDMABUF_PAGES_H

#include <linux/types.h>

struct dmafile_pages;
struct file;

int udmabuf_pages_pin(struct dmafile_pages *pages, struct file *memfd, loff_t start, loff_t size);
void udmabuf_pages_unpin(struct dmafile_pages *pages);

#endif /* _UDMABUF_PAGES_H */
