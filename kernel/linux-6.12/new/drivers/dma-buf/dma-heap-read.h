/* SPDX-License-Identifier: GPL-2.0-only */
/* DMA_HEAP_ALLOC_AND_READ_FILE: allocate a buffer from a heap and read a file into it. */
#ifndef _DMA_HEAP_READ_H
#define _DMA_HEAP_READ_H

#include <linux/types.h>

struct dma_buf;
struct dma_heap;
struct dma_heap_allocation_data;
struct dma_heap_ops;
struct dmafile_io;
struct dmafile_pages;

struct dma_buf *dma_heap_read_file(struct dma_heap *heap, const struct dma_heap_ops *ops,
				   const struct dma_heap_allocation_data *data);
int dma_heap_fill(struct dmafile_io *io, struct dmafile_pages *pages);

#endif /* _DMA_HEAP_READ_H */
