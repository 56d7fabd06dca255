/* SPDX-License-Identifier: GPL-2.0-only */
/* The dma-bufs of this module. */
#ifndef _DMAFILE_BUFFER_H
#define _DMAFILE_BUFFER_H

#include <linux/dma-buf.h>

#include "pages.h"

struct seq_file;

struct dma_buf *dmafile_buffer_export(struct dmafile_pages *pages, unsigned int fd_flags,
				      const char *origin);
bool dmafile_buffer_is(const struct dma_buf *dmabuf);
struct dmafile_pages *dmafile_buffer_begin(struct dma_buf *dmabuf, bool fill, bool interruptible);
void dmafile_buffer_end(struct dma_buf *dmabuf, bool fill);
void dmafile_buffer_list(struct seq_file *file);

#endif /* _DMAFILE_BUFFER_H */
