/* SPDX-License-Identifier: GPL-2.0-only */
/* The memory of an udmabuf: pinned folios of memfds, an entry for each. */
#ifndef _UDMABUF_PAGES_H
#define _UDMABUF_PAGES_H

#include <linux/types.h>

struct device;
struct dmafile_pages;
struct file;
struct sg_table;
struct vm_fault;

int udmabuf_pages_pin(struct dmafile_pages *pages, struct file *memfd, loff_t start, loff_t size);
void udmabuf_pages_unpin(struct dmafile_pages *pages);
int udmabuf_pages_sg(const struct dmafile_pages *pages, struct device *dev, struct sg_table *sg);
vm_fault_t udmabuf_pages_fault(const struct dmafile_pages *pages, struct vm_fault *vmf);

#endif /* _UDMABUF_PAGES_H */
